"""What one rank has seen while a run was profiled."""

from dataclasses import dataclass, field

ROUNDS = "rounds"
"""The session that looks at rounds; others have the names of the server's networks."""
PROFILER = "profiler"
"""The track of what starting and stopping a session takes; it is no part of the run's
own times.
"""


@dataclass(frozen=True)
class Span:
    """A piece of time with a name; seconds count from the start of the run."""

    track: str
    """`phases`, `server`, `profiler`, or a kind of kernels."""
    name: str
    begin: float
    seconds: float


@dataclass(frozen=True)
class Operator:
    """A kernel on a GPU, an operator on a CPU, over a whole session."""

    name: str
    seconds: float
    """Its own time, without what it calls."""
    calls: int


@dataclass(frozen=True)
class Session:
    """Some rounds or steps under torch's profiler."""

    name: str
    number: int
    """How many rounds or steps."""
    seconds: float
    busy: float
    """The share of that time in which the device (on a CPU: an operator of torch) was
    at work.
    """
    operators: list[Operator]


@dataclass
class Timeline:
    """Spans, memory and sessions of one rank."""

    rank: int
    role: str
    host: str
    device: str
    spans: list[Span] = field(default_factory=list)
    memory: list[tuple[float, int]] = field(default_factory=list)
    """Seconds and bytes."""
    sessions: list[Session] = field(default_factory=list)
    warm: int = 0
    """Rounds that were done when the profiler had seen enough. Later ones are warm, and
    run without it.
    """
    paces: dict[str, float] = field(default_factory=dict)
    """Seconds of such a step of each of the server's networks."""
