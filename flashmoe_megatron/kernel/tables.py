"""Tables on the GPU of where the kernel finds the experts' weights, and where gradients go.

Weights stay where their owner has them, in any number of tensors. Each table is made once for the
tensors that it points to, since making one takes the host longer than a launch.
"""

import ctypes
import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import TypeVar

import torch

from flashmoe_megatron.checks import check_kernel_tensor, check_weights
from flashmoe_megatron.config import MoEConfig
from flashmoe_megatron.errors import ConfigError, ShapeError
from flashmoe_megatron.kernel import bindings, ops
from flashmoe_megatron.kernel.gradients import UniformGrads
from flashmoe_megatron.kernel.group_memory import GroupMemory
from flashmoe_megatron.promise import Making
from flashmoe_megatron.weights import MATRIX, VECTOR, ExpertWeights, WeightGrad

MOST_LAYERS = 1024
"""Most layers with tables that share a backend; tables of weights that move must not pile up."""

_Table = TypeVar("_Table")


@dataclass(frozen=True)
class WeightTables:
    """Tables on the device: TMA descriptors of all matrices, and addresses of biases.

    With experts in FP8 the descriptors are of ``copies``, which launches fill from the weights
    themselves.
    """

    maps: torch.Tensor
    copies: torch.Tensor | None
    biases: torch.Tensor | None


class AddressTables:
    """The tables of all layers of a backend; ``memory`` keeps tables that graphs have captured."""

    def __init__(self, config: MoEConfig, memory: GroupMemory, device: torch.device) -> None:
        self._config, self._num_matrices = config, 2 * config.num_local_experts
        self._memory = memory
        self._device = device
        self._of_weights: dict[tuple[Hashable, ...], WeightTables] = {}
        self._of_grads: dict[tuple[Hashable, ...], torch.Tensor] = {}
        # A graph may outlive its layers, and reads tables that calls before its capture have made.
        weakref.finalize(self, memory.captured.keep_left, self._of_weights).atexit = False
        self._copies: torch.Tensor | None = None

    def of_weights(
        self,
        weights: ExpertWeights,
        problem: bindings.FlashMoEProblem,
        sizes: bindings.FlashMoESizes,
        copies: torch.Tensor | None = None,
    ) -> WeightTables:
        """Returns the tables of a layer's weights, whose addresses are read again at every call.

        Args:
            weights: The layer's.
            problem: The library's for the weights' dtype and layout.
            sizes: Likewise.
            copies: Memory for this layer's copies alone, else all layers use one in turn.

        Raises:
            ShapeError: A weight is not what the layer was built for, or the kernel cannot read it.
            ConfigError: Only one projection has biases.
        """
        tensors = weights.tensors
        # One weight stands for the rest of all: this runs before every launch, as the GPU waits.
        first = tensors[0]
        layout = weights.transposed, weights.split, first.shape, first.stride(), first.dtype
        key: tuple[Hashable, ...] = layout, tuple(map(torch.Tensor.data_ptr, tensors))
        if problem.spare_slots:
            key += (self._heap(problem),)
        if copies is not None:
            key += (copies.data_ptr(),)
        if len(tensors) < self._num_matrices:  # few, and how stacks step counts
            key += tuple(map(torch.Tensor.stride, tensors))
        known = self._of_weights.get(key)
        if known is not None:
            return known
        weights = check_weights(self._config, weights, self._device)
        for weight in (*weights.fc1, *weights.fc2, *weights.fc1_bias, *weights.fc2_bias):
            check_kernel_tensor("expert weight", weight, self._device, first.dtype)
        if bool(weights.fc1_bias) != bool(weights.fc2_bias):
            raise ConfigError("one of fc1 and fc2 has biases, the other has none: wanted both")
        local = self._config.num_local_experts
        kinds = {"fc1": weights.fc1[:local], "fc1_up": weights.fc1[local:], "fc2": weights.fc2}
        kinds |= {"fc1_bias": weights.fc1_bias, "fc2_bias": weights.fc2_bias}
        spare = self._spare_slots(problem)
        addresses = {
            kind: [*map(torch.Tensor.data_ptr, own), *(getattr(slot, kind) for slot in spare)]
            for kind, own in kinds.items()
            if own
        }
        fc1, fc2 = (
            (ctypes.c_void_p * len(each))(*each)
            for each in (addresses["fc1"] + addresses.get("fc1_up", []), addresses["fc2"])
        )
        host = torch.empty(sizes.weight_map_bytes, dtype=torch.uint8, device="cpu")
        if copies is None:
            copies = self._copies_of_a_layer(max(sizes.weight_copy_bytes))
        at = None if copies is None else copies.data_ptr()
        bindings.call("encode_weights", problem, fc1, fc2, at, host.data_ptr())
        biases = addresses.get("fc1_bias", []) + addresses.get("fc2_bias", [])
        of_biases = torch.tensor(biases, dtype=torch.int64, device="cpu")
        tables = WeightTables(
            self._upload(host), copies, self._upload(of_biases) if biases else None
        )
        self._remember(self._of_weights, key, tables)
        return tables

    def _copies_of_a_layer(self, num_bytes: int) -> torch.Tensor | None:
        """Returns memory for copies of weights, which all layers of a backend use in turn."""
        copies = self._copies
        if copies is None and num_bytes > 0:
            copies = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
            if torch.cuda.is_current_stream_capturing():
                self._memory.captured.keep(copies)
            else:
                self._copies = copies
        return copies

    def own_copies(self, making: Making, num_bytes: int) -> torch.Tensor:
        """Returns memory for the copies that passes of one direction keep of a layer's weights."""
        copies = making.made
        if (
            not isinstance(copies, torch.Tensor)
            or copies.nbytes != num_bytes
            or copies.device != self._device
        ):
            copies = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
            making.keep(copies)
        if torch.cuda.is_current_stream_capturing():
            self._memory.captured.keep(copies)
        return copies

    def of_grads(
        self,
        grads: UniformGrads,
        dtype: torch.dtype,
        problem: bindings.FlashMoEProblem,
        sizes: bindings.FlashMoESizes,
    ) -> torch.Tensor:
        """The table of where gradients go.

        They are those of all fc1, then of all fc2, then of their biases in the same order if there
        are any. If any is not wanted, which is ``None``, each is one expert's. The dtype is the
        weights'; see :meth:`of_weights` for the others.

        Raises:
            ShapeError: The kernel cannot write one of them, or they are not one for each weight.
        """
        num_weights = (3 if problem.is_split else 2) * self._config.num_local_experts
        num_grads, buffers = len(grads.grads), grads.buffers
        grads_dtype, is_added = grads.form or (dtype, True)
        layout = problem.is_transposed, problem.is_split, grads_dtype, self._heap(problem)
        dims = tuple(map(torch.Tensor.dim, buffers))
        key: tuple[Hashable, ...] = layout, grads.addresses, dims
        if len(buffers) < num_grads:
            key += (tuple(grad is None for grad in grads.grads),)
        # Buffers of another size may be where these are the next time; and stacks have lengths.
        if not is_added or num_grads not in (num_weights, num_weights + self._num_matrices):
            key += tuple((each.shape, each.stride(), each.dtype) for each in buffers)
        table = self._of_grads.get(key)
        if table is None:
            addresses = self._addresses(grads.grads, num_weights)
            for buffer in buffers:
                check_kernel_tensor("weight gradient", buffer, self._device, torch.float32, dtype)
            self._check_sizes(grads.grads, problem)
            weights, biases = (
                (ctypes.c_void_p * len(each))(*each)
                for each in self._with_spare(addresses, num_weights, problem)
            )
            host = torch.empty(sizes.grad_table_bytes, dtype=torch.uint8, device="cpu")
            bindings.call(
                "encode_grads",
                problem,
                weights,
                biases or None,
                ops.dtype_code(grads_dtype),
                host.data_ptr(),
            )
            table = self._upload(host)
            self._remember(self._of_grads, key, table)
        elif torch.cuda.is_current_stream_capturing():
            self._memory.captured.keep(table)  # which may be forgotten before the graph is
        return table

    def _with_spare(
        self, addresses: list[int], num_weights: int, problem: bindings.FlashMoEProblem
    ) -> tuple[list[int], list[int]]:
        """Gradients of weights and of biases, each kind of the local experts and of spare slots."""
        kinds = ["fc1_grad", "fc2_grad", "fc1_bias_grad", "fc2_bias_grad"]
        if problem.is_split:
            kinds.insert(1, "fc1_up_grad")
        spare, local = self._spare_slots(problem), self._config.num_local_experts
        lists: tuple[list[int], list[int]] = ([], [])
        for kind, first in zip(kinds, range(0, len(addresses), local), strict=False):
            of_kind = lists[first >= num_weights]
            of_kind += addresses[first : first + local]
            of_kind += (getattr(slot, kind) for slot in spare)
        return lists

    def _heap(self, problem: bindings.FlashMoEProblem) -> tuple[int, ...]:
        """The places of spare slots, by the heap's address and layout; empty if there are none."""
        if not problem.spare_slots:
            return ()
        bounds = (problem.heap_tokens, problem.heap_topk, problem.heap_experts)
        return self._memory.own_heap, *bounds, problem.heap_slot_elements

    def _spare_slots(self, problem: bindings.FlashMoEProblem) -> list[bindings.FlashMoESlot]:
        slots = []
        for number in range(problem.spare_slots):
            slots.append(bindings.FlashMoESlot())
            bindings.call("slot", problem, self._memory.own_heap, number, slots[-1])
        return slots

    def _addresses(self, grads: Sequence[WeightGrad | None], num_weights: int) -> list[int]:
        """The addresses where experts' gradients begin, also within stacks; 0: none is wanted."""
        num_biases = 2 * self._config.num_local_experts
        wanted = list(filter(None, grads))
        buffers = list(map(itemgetter(0), wanted))
        dims = list(map(torch.Tensor.dim, buffers))
        if len(wanted) < len(grads):
            addresses = [0 if grad is None else grad.buffer.data_ptr() for grad in grads]
        elif dims == [MATRIX] * num_weights + [VECTOR] * (len(dims) - num_weights):  # no stacks
            addresses = list(map(torch.Tensor.data_ptr, buffers))
        else:
            addresses = self._addresses_in_stacks(wanted, num_weights)
        if len(addresses) not in (num_weights, num_weights + num_biases):
            raise ShapeError(
                f"{len(addresses)} gradients of weights and biases, wanted {num_weights} of "
                f"weights, and {num_biases} of biases or none"
            )
        return addresses

    def _addresses_in_stacks(self, grads: Sequence[WeightGrad], num_weights: int) -> list[int]:
        addresses: list[int] = []
        for grad in grads:
            buffer, num_dims = grad.buffer, MATRIX if len(addresses) < num_weights else VECTOR
            begin = buffer.data_ptr()
            if buffer.dim() == num_dims:
                addresses.append(begin)
            else:
                num_bytes = buffer.nbytes
                addresses += range(begin, begin + num_bytes, num_bytes // buffer.shape[0])
        return addresses

    def _check_sizes(
        self, grads: Sequence[WeightGrad | None], problem: bindings.FlashMoEProblem
    ) -> None:
        """Refuses gradients that end elsewhere than their weights."""
        config, experts = self._config, self._config.num_local_experts
        matrix = config.hidden * config.intermediate
        fc1 = (matrix, matrix) if problem.is_split else (config.fc1_rows * config.hidden,)
        matrices = (*fc1, matrix)
        wanted = [
            (size, num_dims)
            for sizes, num_dims in ((matrices, MATRIX), ((config.fc1_rows, config.hidden), VECTOR))
            for size in sizes
            for _ in range(experts)
        ]
        count = 0
        for grad in grads:
            if grad is None:
                count += 1
                continue
            size, num_dims = wanted[count]
            stacked = len(grad.buffer) if grad.buffer.dim() > num_dims else 1
            if grad.buffer.numel() != stacked * size:
                raise ShapeError(
                    f"a weight gradient has shape {tuple(grad.buffer.shape)}, wanted {size} "
                    f"elements of each of {stacked} experts"
                )
            count += stacked

    def _upload(self, host: torch.Tensor) -> torch.Tensor:
        """A table on the device. A graph that captures the copy repeats it at every replay."""
        pinned = host.pin_memory()
        table = pinned.to(self._device, non_blocking=True)
        if torch.cuda.is_current_stream_capturing():
            self._memory.captured.keep(pinned, table)
        return table

    def _remember(
        self, tables: dict[tuple[Hashable, ...], _Table], key: tuple[Hashable, ...], table: _Table
    ) -> None:
        if torch.cuda.is_current_stream_capturing():
            return  # what it holds is there once a graph is replayed, for that graph
        if len(tables) >= MOST_LAYERS:
            if tables is self._of_weights:  # a capture keeps gradients' tables itself
                self._memory.captured.keep_left(*tables.values())
            tables.clear()
        tables[key] = table
