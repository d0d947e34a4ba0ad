"""GRU and LSTM of many clients, each with its own weights.

A time step is one batched product and one kernel for all clients. Products with the
inputs, and the gradients of all weights, are computed for all time steps at once.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hpcfed.models.stacked_layer import Batch, StackedLayer


class StackedRecurrent(StackedLayer):
    """What GRU and LSTM have in common: layers, directions, and the order of axes."""

    gates: int

    def __init__(
        self, plain: nn.GRU | nn.LSTM, batch: Batch, name: str, numbers: Iterator[int]
    ) -> None:
        super().__init__(plain, batch, name, numbers)
        # torch drops out between layers only, so a single layer has no dropout.
        if plain.dropout and plain.num_layers > 1:
            raise TypeError(f"{type(plain).__name__} with dropout does not stack")
        if getattr(plain, "proj_size", 0):
            raise TypeError("LSTM with a projection does not stack")
        self.layers = plain.num_layers
        self.directions = 2 if plain.bidirectional else 1
        self.hidden = plain.hidden_size
        self.batch_first = plain.batch_first

    def forward(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        """Pass [clients · slots, length, inputs] forward."""
        if not self.batch_first:
            raise TypeError("folded clients need batch_first=True")
        if state is not None:
            raise TypeError("folded clients begin with a state of zeros")
        clients = self.batch.num_clients
        y, last = self._run(x.unflatten(0, (clients, -1)))
        # [clients, layers, slots, hidden] → [layers, clients · slots, hidden]
        folded = []
        for tensor in last:
            folded.append(tensor.transpose(0, 1).flatten(1, 2))
        return y.flatten(0, 1), self._state(folded)

    def by_client(self, x: Tensor, state: Any = None) -> Any:
        """Pass [clients, slots, length, inputs] forward, or [clients, length, slots,
        inputs] if the length comes first.
        """
        if state is not None:
            raise TypeError("stacked clients begin with a state of zeros")
        if not self.batch_first:
            x = x.transpose(1, 2)
        y, last = self._run(x)
        if not self.batch_first:
            y = y.transpose(1, 2)
        return y, self._state(last)

    def _state(self, last: list[Tensor]) -> Any:
        raise NotImplementedError

    def _cell(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> list[Tensor]:
        """Run all time steps; return hidden states and the last state of each kind."""
        raise NotImplementedError

    def _run(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Pass [clients, slots, length, inputs] through all layers."""
        last: list[list[Tensor]] = []
        for layer in range(self.layers):
            outputs = []
            for direction in range(self.directions):
                suffix = f"_l{layer}" + ("_reverse" if direction else "")
                turned = x.flip(2) if direction else x
                hidden, *states = self._direction(turned, suffix)
                # Turned back, so that both directions of a position stand side by side.
                outputs.append(hidden.flip(2) if direction else hidden)
                # In torch's order: each layer forward, then reverse.
                last.append(states)
            x = outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)
        kinds = zip(*last, strict=True)
        return x, [torch.stack(kind, 1) for kind in kinds]

    def _direction(self, x: Tensor, suffix: str) -> list[Tensor]:
        clients, slots, length, inputs = x.shape
        weight = self._tensor(f"weight_ih{suffix}")
        assert weight is not None
        flat = x.reshape(clients, slots * length, inputs)
        bias = self._tensor(f"bias_ih{suffix}")
        transposed = weight.transpose(1, 2)
        if bias is None:
            gates = torch.bmm(flat, transposed)
        else:
            gates = torch.baddbmm(bias.unsqueeze(1), flat, transposed)
        # Time first, so that a time step is contiguous in memory.
        by_time = gates.view(clients, slots, length, -1).permute(2, 0, 1, 3)
        recurrent = self._tensor(f"weight_hh{suffix}")
        assert recurrent is not None
        return self._cell(
            by_time.contiguous(), recurrent, self._tensor(f"bias_hh{suffix}")
        )

    def _tensor(self, name: str) -> Tensor | None:
        return self._parameters.get(name)


class StackedGRU(StackedRecurrent):
    def _state(self, last: list[Tensor]) -> Tensor:
        return last[0]

    def _cell(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> list[Tensor]:
        if bias is None:
            bias = weight.new_zeros(weight.shape[:2])
        hidden = _Gru.apply(x, weight, bias)
        return [hidden.permute(1, 2, 0, 3), hidden[-1]]


class StackedLSTM(StackedRecurrent):
    def _state(self, last: list[Tensor]) -> tuple[Tensor, ...]:
        return tuple(last)

    def _cell(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> list[Tensor]:
        if bias is None:
            bias = weight.new_zeros(weight.shape[:2])
        hidden, cell = _Lstm.apply(x, weight, bias)
        return [hidden.permute(1, 2, 0, 3), hidden[-1], cell]


class _Gru(torch.autograd.Function):
    """All time steps of a GRU: gates of the inputs [length, clients, slots, 3 hidden]
    to hidden states [length, clients, slots, hidden].
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        length, clients, slots, width = x.shape
        hidden = x.new_empty(length, clients, slots, width // 3)
        transposed = weight.transpose(1, 2)
        state = x.new_zeros(clients, slots, width // 3)
        saved = []
        for time in range(length):
            recurrent = torch.baddbmm(bias.unsqueeze(1), state, transposed)
            state, kept = gru_step(x[time], recurrent, state)
            hidden[time] = state
            saved.append(kept)
        ctx.save_for_backward(hidden, weight, *saved)
        return hidden

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden, weight, *saved = ctx.saved_tensors
        length, clients, slots, width = hidden.shape
        dx = hidden.new_empty(length, clients, slots, 3 * width)
        dr = torch.empty_like(dx)
        dstate = torch.zeros_like(hidden[0])
        zero = torch.zeros_like(hidden[0])
        for time in reversed(range(length)):
            before = hidden[time - 1] if time else zero
            total = dy[time] + dstate
            dx[time], dr[time], direct = gru_step_backward(total, saved[time], before)
            dstate = torch.baddbmm(direct, dr[time], weight)
        # All time steps at once: the states before them, and the gates' gradients.
        before = torch.cat([zero.unsqueeze(0), hidden[:-1]])
        flat_before = before.transpose(0, 1).reshape(clients, -1, width)
        flat_dr = dr.transpose(0, 1).reshape(clients, -1, 3 * width)
        dw = torch.bmm(flat_dr.transpose(1, 2), flat_before)
        return dx, dw, flat_dr.sum(1)


def gru_step(x: Tensor, recurrent: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return the new state, and what the backward pass needs."""
    if x.is_cuda:
        width = state.shape[-1]
        new, kept = torch.ops.aten._thnn_fused_gru_cell(
            x.reshape(-1, 3 * width),
            recurrent.reshape(-1, 3 * width),
            state.reshape(-1, width),
        )
        return new.view_as(state), kept
    # torch's order of gates: reset, update, new.
    xr, xz, xn = x.chunk(3, -1)
    hr, hz, hn = recurrent.chunk(3, -1)
    r = torch.sigmoid(xr + hr)
    z = torch.sigmoid(xz + hz)
    # r also scales the recurrent bias in hn, so the two biases cannot be added up.
    n = torch.tanh(xn + r * hn)
    return n + z * (state - n), torch.cat([r, z, n, hn], -1)


def gru_step_backward(
    d: Tensor, kept: Tensor, state: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients of the inputs' gates, of the recurrent gates, and of the
    previous state without the part that comes through the gates.
    """
    if d.is_cuda:
        width = state.shape[-1]
        dx, dr, direct, _, _ = torch.ops.aten._thnn_fused_gru_cell_backward(
            # False: no gradients of biases, which are sums of the gates' gradients.
            d.reshape(-1, width),
            kept,
            False,
        )
        shape = (*d.shape[:-1], 3 * width)
        return dx.view(shape), dr.view(shape), direct.view_as(d)
    r, z, n, hn = kept.chunk(4, -1)
    dn = d * (1 - z) * (1 - n * n)
    dz = d * (state - n) * z * (1 - z)
    dr_gate = dn * hn * r * (1 - r)
    dx = torch.cat([dr_gate, dz, dn], -1)
    # Only the new gate differs: r scaled its recurrent part.
    dr = torch.cat([dr_gate, dz, dn * r], -1)
    return dx, dr, d * z


class _Lstm(torch.autograd.Function):
    """All time steps of an LSTM: gates of the inputs [length, clients, slots, 4 hidden]
    to hidden states [length, clients, slots, hidden], and the last cell state.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor
    ) -> tuple[Tensor, Tensor]:
        length, clients, slots, width = x.shape
        hidden = x.new_empty(length, clients, slots, width // 4)
        transposed = weight.transpose(1, 2)
        state = x.new_zeros(clients, slots, width // 4)
        cell = torch.zeros_like(state)
        saved = []
        for time in range(length):
            recurrent = torch.baddbmm(bias.unsqueeze(1), state, transposed)
            before = cell
            state, cell, gates = lstm_step(x[time], recurrent, before)
            hidden[time] = state
            saved += [gates, before]
        ctx.save_for_backward(hidden, weight, cell, *saved)
        return hidden, cell

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, dc: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden, weight, cell, *saved = ctx.saved_tensors
        length, clients, slots, width = hidden.shape
        dgates = hidden.new_empty(length, clients, slots, 4 * width)
        zero = torch.zeros_like(hidden[0])
        dstate = zero
        dcell = dc
        for time in reversed(range(length)):
            gates, before = saved[2 * time : 2 * time + 2]
            total = dy[time] + dstate
            dgates[time], dcell = lstm_step_backward(total, dcell, gates, before, cell)
            dstate = torch.bmm(dgates[time], weight)
            cell = before
        states = torch.cat([zero.unsqueeze(0), hidden[:-1]])
        flat_states = states.transpose(0, 1).reshape(clients, -1, width)
        flat = dgates.transpose(0, 1).reshape(clients, -1, 4 * width)
        dw = torch.bmm(flat.transpose(1, 2), flat_states)
        return dgates, dw, flat.sum(1)


def lstm_step(
    x: Tensor, recurrent: Tensor, cell: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the new state, the new cell, and the gates for the backward pass."""
    if x.is_cuda:
        width = cell.shape[-1]
        state, new, gates = torch.ops.aten._thnn_fused_lstm_cell(
            x.reshape(-1, 4 * width),
            recurrent.reshape(-1, 4 * width),
            cell.reshape(-1, width),
        )
        return state.view_as(cell), new.view_as(cell), gates
    # torch's order of gates: input, forget, cell, output.
    i, f, g, o = (x + recurrent).chunk(4, -1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    new = f * cell + i * g
    return o * new.tanh(), new, torch.cat([i, f, g, o], -1)


def lstm_step_backward(
    d: Tensor, dcell: Tensor, gates: Tensor, before: Tensor, cell: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the gates and of the previous cell."""
    if d.is_cuda:
        width = cell.shape[-1]
        dgates, dbefore, _ = torch.ops.aten._thnn_fused_lstm_cell_backward_impl(
            d.reshape(-1, width),
            dcell.reshape(-1, width),
            before.reshape(-1, width),
            cell.reshape(-1, width),
            gates,
            False,
        )
        return dgates.view(*d.shape[:-1], 4 * width), dbefore.view_as(d)
    i, f, g, o = gates.chunk(4, -1)
    tanh = cell.tanh()
    total = dcell + d * o * (1 - tanh * tanh)
    di = total * g * i * (1 - i)
    df = total * before * f * (1 - f)
    dg = total * i * (1 - g * g)
    do = d * tanh * o * (1 - o)
    return torch.cat([di, df, dg, do], -1), total * f
