"""Times a forward in blockwise FP8 beside bfloat16's, in turns, on one GPU.

    python -m tools.bench.fp8_forward --one-of 4 --out results.jsonl

It calls the C interface. All forwards are of a rank that is alone, with the same tokens, routing
and weights; in FP8 it quantizes weights, tokens and activations itself. A third one ("current") is
in FP8, too, and has copies of its weights from an earlier forward, as all micro-batches of a step
but the first can have. Values are random, since power bounds what products reach. Each forward is
compared with float32's first. Each turn begins with the same forward, untimed, for ``--settle-ms``:
a kind is timed at the clock that it sustains itself, not at one that depends on the kind before it.
"""

import ctypes
import sys
from functools import partial

import torch

from flashmoe_megatron.bench import stopwatch
from flashmoe_megatron.bench.correctness import LayerResults
from flashmoe_megatron.bench.problem import Problem
from flashmoe_megatron.config import MAX_RANKS, MoEConfig
from flashmoe_megatron.kernel import bindings
from tools.bench import fp8_times
from tools.bench.fp8_times import Takers, pass_own_gate


class Rank:
    """One rank's memory, and its calls of the C interface; ranks of one group share a process.

    Attributes:
        rows: What dispatch receives.
        preact: Pre-activations.
        scratch: The input of fc2, at its beginning.
        out: The layer's output.
        plan: What a forward leaves.
    """

    def __init__(
        self,
        config: MoEConfig,
        fc1: list[torch.Tensor],
        fc2: list[torch.Tensor],
        *,
        rank: int = 0,
        num_ctas: int,
        split: bool = False,
    ) -> None:
        """Makes the memory of one layer.

        Args:
            config: The layer.
            fc1: Weights of the rank's experts, in bfloat16.
            fc2: As ``fc1``.
            rank: Which rank it is.
            num_ctas: CTAs of each launch.
            split: Whether gate and up rows are matrices of their own.
        """
        self.config, self._weights = config, (fc1, fc2)
        self._problem = bindings.problem_of(
            config,
            rank=rank,
            dtype=bindings.BFLOAT16,
            transposed=False,
            split=split,
            num_ctas=num_ctas,
            heap=bindings.HeapBounds.of(config),
            timeout=10.0,
        )
        self.sizes = sizes = bindings.FlashMoESizes()
        bindings.call("sizes", self._problem, sizes)
        bindings.call("preload", self._problem)
        self.blocks = int(sizes.max_row_blocks)
        self.heap = self._empty(sizes.heap_bytes).zero_()
        self._workspace = self._empty(sizes.workspace_bytes).zero_()
        self._mailbox = torch.zeros(sizes.mailbox_bytes, dtype=torch.uint8).pin_memory()
        self.plan = self._empty(sizes.plan_bytes)
        self.rows = self._empty(self.blocks * sizes.row_block_bytes)
        self.preact = self._empty(self.blocks * sizes.preact_block_bytes)
        self.scratch = self._empty(self.blocks * sizes.scratch_block_bytes[0])
        self.out = torch.empty(
            config.max_tokens, config.hidden, dtype=torch.bfloat16, device="cuda"
        )
        self.stream = torch.cuda.Stream()
        maps = torch.empty(sizes.weight_map_bytes, dtype=torch.uint8)
        num_bytes = max(sizes.weight_copy_bytes)
        self._copies = self._empty(num_bytes) if config.in_fp8 else None
        bindings.call(
            "encode_weights",
            self._problem,
            *map(_addresses, self._weights),
            self._copies.data_ptr() if self._copies is not None else None,
            maps.data_ptr(),
        )
        self._maps = maps.cuda()
        self._group = bindings.FlashMoEGroup()

    def join(self, ranks: "list[Rank]") -> None:
        """Makes the ranks a group; each rank calls it once."""
        heaps = (ctypes.c_void_p * MAX_RANKS)(*(one.heap.data_ptr() for one in ranks))
        self._group = bindings.FlashMoEGroup(
            heaps=heaps,
            workspace=self._workspace.data_ptr(),
            mailbox=self._mailbox.data_ptr(),
            stream=self.stream.cuda_stream,
        )

    def forward(
        self,
        x: torch.Tensor,
        probs: torch.Tensor,
        routing_map: torch.Tensor,
        *,
        plan_apart: bool = False,
        copies_are_current: bool = False,
    ) -> None:
        """Launches a forward on the rank's stream; all ranks of a group do.

        Args:
            x: The rank's tokens.
            probs: ``[tokens, num_experts]`` float32.
            routing_map: ``[tokens, num_experts]`` bool.
            plan_apart: Whether a launch of its own plans.
            copies_are_current: Whether an earlier forward has quantized the weights.
        """
        given = bindings.FlashMoEInput(
            num_tokens=len(x),
            probs_dtype=bindings.FLOAT32,
            x=x.data_ptr(),
            probs=probs.data_ptr(),
            routing_map=routing_map.data_ptr(),
        )
        if plan_apart:
            bindings.call("plan", self._problem, self._group, given, self.plan.data_ptr())
        launch = self._launch(len(x))
        launch.copies_are_current = copies_are_current
        bindings.call("forward", self._problem, self._group, given, launch, plan_apart)

    def gather(self, x: torch.Tensor) -> None:
        """Launches the dispatch of the last forward's rows again; all ranks of a group do."""
        bindings.call("gather", self._problem, self._group, self._launch(len(x)), x.data_ptr())

    def fault(self) -> str:
        """Says what the last launch waited for in vain, if it did."""
        fault = bindings.FlashMoEFault()
        bindings.call("read_fault", self._group, fault)
        return bindings.load().flashmoe_wait_name(fault.wait).decode() if fault.code else ""

    def _launch(self, num_tokens: int) -> bindings.FlashMoELaunch:
        return bindings.FlashMoELaunch(
            num_row_blocks=self.blocks,
            num_tokens=num_tokens,
            plan=self.plan.data_ptr(),
            weight_maps=self._maps.data_ptr(),
            weight_copies=self._copies.data_ptr() if self._copies is not None else None,
            rows=self.rows.data_ptr(),
            preact=self.preact.data_ptr(),
            scratch=self.scratch.data_ptr(),
            out=self.out.data_ptr(),
        )

    @staticmethod
    def _empty(num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device="cuda")


def _addresses(tensors: list[torch.Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(tensors))(*(one.data_ptr() for one in tensors))


def lone_rank(problem: Problem, experts: str) -> Rank:
    """Returns a rank that has a problem's weights, in bfloat16 ("bf16") or FP8 ("fp8")."""
    given = problem.config
    names = ("hidden", "intermediate", "num_experts", "topk", "max_tokens", "activation", "gated")
    config = MoEConfig(
        **{name: getattr(given, name) for name in names}, num_ranks=1, experts=experts
    )
    weights = [
        [one.detach() for one in kind] for kind in (problem.weights.fc1, problem.weights.fc2)
    ]
    sms = torch.cuda.get_device_properties("cuda").multi_processor_count
    rank = Rank(config, *weights, num_ctas=sms // 2 * 2)
    rank.join([rank])
    return rank


def turn_ms(
    rank: Rank,
    problem: Problem,
    launches: int,
    settle_ms: float = 0.0,
    *,
    copies_are_current: bool = False,
) -> float:
    """Milliseconds of a launch, of some that follow one another without a pause.

    Args:
        rank: A rank that is alone.
        problem: Its tokens and routing.
        launches: How many are timed.
        settle_ms: How long the same launches run before that.
        copies_are_current: Whether only a first one, which is not timed, quantizes weights.

    Raises:
        RuntimeError: A launch has waited in vain.
    """
    given = problem.x.detach(), problem.probs.detach(), problem.routing_map
    launch = partial(rank.forward, *given, copies_are_current=copies_are_current)
    with torch.cuda.stream(rank.stream):
        rank.forward(*given)
        taken = stopwatch.turn_ms(launch, launches, settle_ms)
    if fault := rank.fault():
        raise RuntimeError(f"a launch gave up: {fault}")
    return taken


def takers_of(name: str, problem: Problem, times: int, settle_ms: float) -> Takers:
    """Makes the forwards of a problem, which have passed the gate."""
    ranks = {precision: lone_rank(problem, precision) for precision in ("bf16", "fp8")}
    takers: Takers = {}
    for kind, precision in (("bf16", "bf16"), ("fp8", "fp8"), ("current", "fp8")):
        rank, is_current = ranks[precision], kind == "current"
        rank.out.fill_(float("nan"))
        torch.cuda.synchronize()  # the rank has a stream of its own
        turn_ms(rank, problem, 1, copies_are_current=is_current)
        out = LayerResults(rank.out)
        pass_own_gate(f"{name}, {kind}", problem, out, in_fp8=rank.config.in_fp8)
        takers[kind] = partial(
            turn_ms, rank, problem, times, settle_ms, copies_are_current=is_current
        )
    return takers


def main(arguments: list[str]) -> int:
    """Runs the command line; the status is 2 without a GPU."""
    return fp8_times.run("fp8_forward", fp8_times.parse(arguments, __doc__, times=10), takers_of)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
