"""`hpcfed privacy`: compute ε from the noise, or the noise from ε, without a run."""

from hpcfed.cli.parser import CommandParser
from hpcfed.cli.settings import parse_run
from hpcfed.errors import remark
from hpcfed.options import check_privacy

SUMMARY = "what noise a run needs for its privacy, or how private its noise makes it"
EXAMPLES = """\
  hpcfed privacy --clients 1000 --cohort 50 --rounds 1500 --target-epsilon 2 --delta 1e-6
  hpcfed privacy --clients 1000 --cohort 50 --rounds 1500 --noise-multiplier 1 --accountant rdp
  hpcfed privacy my.toml --rounds 3000                        the run of a file, but longer"""


def command(arguments: list[str]) -> None:
    parser = CommandParser(
        "privacy",
        EXAMPLES,
        usage="hpcfed privacy [CONFIG.toml] [options]",
        description="Prints ε for a given noise, or the noise for a given ε, and what ε "
        "is for. Takes the options of hpcfed run, and runs nothing. Privacy is central "
        "unless --privacy says otherwise.",
    )
    _, words = parser.parse_known_args(arguments)
    settings = parse_run(words)
    if settings.config.privacy == "none":
        settings = parse_run([*words, "--privacy", "central"])
    check_privacy(settings.config, settings.options)
    if settings.config.target_epsilon is not None:
        remark("looking for the noise; many rounds or little noise take some seconds")
    # Late: the accountant's library takes a second to load.
    from hpcfed.federation.channel.accountant import guarantee

    print(guarantee(settings.config))
