"""The settings of a sweep, and the points that they make."""

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from tools.bench.shapes import Shape

IMPLEMENTATIONS = ("fused", "unfused")
PASSES = ("forward", "forward+backward")
KERNELS = ("forward", "backward")


@dataclass(frozen=True, order=True)
class Point:
    """One layer on one number of GPUs.

    Attributes:
        num_gpus: Ranks of the expert-parallel group.
        tokens: Tokens of one GPU.
        num_experts: Experts of the whole group.
        hidden: Model width.
        intermediate: FFN width of one expert.
        topk: Experts that each token selects.
    """

    num_gpus: int
    tokens: int
    num_experts: int
    hidden: int
    intermediate: int
    topk: int

    @property
    def key(self) -> str:
        """Names the point in results, logs and wandb."""
        return (
            f"gpus{self.num_gpus}-tokens{self.tokens}-experts{self.num_experts}"
            f"-hidden{self.hidden}-ffn{self.intermediate}-top{self.topk}"
        )

    @property
    def shape(self) -> Shape:
        """The layer, with GELU as in the paper."""
        return Shape(
            self.tokens, self.hidden, self.intermediate, self.num_experts, self.topk, gated=False
        )


@dataclass(frozen=True)
class Settings:
    """Everything that decides what is measured and how; the same in all of a folder's points.

    Attributes:
        device: "cuda" for the kernel and NCCL, "cpu" for the reference backend and gloo.
        gpus: Numbers of GPUs (on CPU: of processes), ascending.
        tokens: Tokens per GPU of the sweep over tokens.
        experts: Experts of the sweep over experts.
        base_tokens: Tokens per GPU of the weak scaling.
        base_experts: Experts of the weak scaling and of the sweep over tokens.
        expert_tokens: Tokens per GPU of the sweep over experts.
        hidden: Model width.
        intermediate: FFN width of one expert.
        topk: Experts that each token selects.
        iterations: Timed calls of each measurement.
        warmup: Calls before them.
        gate: Largest relative L2 error of any result.
        symmetric: What GPUs share memory with.
        seed: Decides tokens, weights and routing.
    """

    device: Literal["cuda", "cpu"]
    gpus: tuple[int, ...]
    tokens: tuple[int, ...]
    experts: tuple[int, ...]
    base_tokens: int
    base_experts: int
    expert_tokens: int
    hidden: int
    intermediate: int
    topk: int
    iterations: int
    warmup: int
    gate: float
    symmetric: Literal["cuda", "nvshmem"]
    seed: int

    def points(self) -> list[Point]:
        """Every point once, by number of GPUs and then by size.

        A larger layer grows the memory that all layers of a process share, so that the smaller
        ones, whose own share is to be told, have to come first.
        """
        base = Point(
            self.gpus[-1],
            self.base_tokens,
            self.base_experts,
            self.hidden,
            self.intermediate,
            self.topk,
        )
        over_tokens = {
            replace(base, num_gpus=gpus, tokens=tokens)
            for gpus in self.gpus
            for tokens in (*self.tokens, self.base_tokens)
        }
        over_experts = {
            replace(base, tokens=self.expert_tokens, num_experts=experts)
            for experts in self.experts
        }
        return sorted(over_tokens | over_experts)

    def as_dict(self) -> dict[str, Any]:
        """The settings for JSON; tuples become lists."""
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in asdict(self).items()
        }

    @staticmethod
    def from_dict(values: dict[str, Any]) -> "Settings":
        """The inverse of :meth:`as_dict`.

        Raises:
            TypeError: A setting is missing, or one is unknown.
        """
        given: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in values.items()
        }
        return Settings(**given)


def paper_settings(gpus: tuple[int, ...]) -> Settings:
    """The paper's: 1K to 32K tokens, 8 to 128 experts, 2048 wide, top-2."""
    return Settings(
        device="cuda",
        gpus=gpus,
        tokens=(1024, 2048, 4096, 8192, 16384, 32768),
        experts=(8, 16, 32, 64, 128),
        base_tokens=8192,
        base_experts=64,
        expert_tokens=16384,
        hidden=2048,
        intermediate=2048,
        topk=2,
        iterations=20,
        warmup=3,
        gate=6e-3,
        symmetric="cuda",
        seed=1,
    )


def small_settings(gpus: tuple[int, ...]) -> Settings:
    """The same on processors, in a minute."""
    return replace(
        paper_settings(gpus),
        device="cpu",
        tokens=(32, 128),
        experts=(4, 16),
        base_tokens=64,
        base_experts=8,
        expert_tokens=128,
        hidden=128,
        intermediate=128,
        iterations=5,
        warmup=1,
    )
