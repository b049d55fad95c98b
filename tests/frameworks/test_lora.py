"""LoRA on experts by PEFT: on, off, merged, narrow, recomputed, and on several ranks."""

import copy
import dataclasses
import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from flashmoe_megatron.call import GradCounters
from flashmoe_megatron.data_parallel import prepare_for_ddp
from flashmoe_megatron.layer import FlashMoELayer
from flashmoe_megatron.oracle import assert_close
from tests.distributed import RankPool
from tests.frameworks.models import SEQUENCE, VOCABULARY, make_config
from tests.frameworks.test_peft import CONFIG, HIDDEN

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

RANK = 4
WHERE = {"target_parameters": ["moe.fc1", "moe.fc2"], "target_modules": ["router"]}
Grads = dict[str, torch.Tensor]


def adapted(model: nn.Module, **where: Any) -> Any:
    """The model with adapters that change it, always the same."""
    torch.manual_seed(1)
    config = peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, init_lora_weights=False, **where)
    model = peft.get_peft_model(model, config)
    with torch.no_grad():
        for name, one in model.named_parameters():
            if "lora_" in name:
                one.mul_(0.2)
    return model


def grads_of(model: nn.Module) -> Grads:
    """The gradients that a backward has left, without the names of wrappers."""
    return {
        name.removeprefix("module."): one.grad
        for name, one in model.named_parameters()
        if one.grad is not None
    }


def assert_grads(got: Grads, want: Grads, rel_l2: float) -> None:
    assert got.keys() == want.keys()
    for name, one in want.items():
        assert_close(name, got[name], one, rel_l2=rel_l2)


@functools.cache
def causal(kind: str, implementation: str) -> Any:
    """A model of transformers with adapters on attention and experts."""
    import flashmoe_megatron.transformers as door

    door.configure(backend="reference")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(make_config(kind, implementation))
    return adapted(
        model,
        target_modules=["q_proj", "v_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    )


def words() -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(VOCABULARY, (2, SEQUENCE), generator=generator)


def loss_of(model: Any) -> torch.Tensor:
    return model(input_ids=words(), labels=words()).loss


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_a_model_of_transformers(kind: str) -> None:
    """Beside eager experts, also with alternating rows, biases and transposed weights."""
    eager, model = (copy.deepcopy(causal(kind, one)) for one in ("eager", "flashmoe"))
    for how in ("on", "checkpointed"):
        found = []
        for one in (eager, model):
            if how == "checkpointed":
                one.gradient_checkpointing_enable({"use_reentrant": False})
                one.train()
            one.zero_grad()
            loss = loss_of(one)
            loss.backward()
            found.append((loss.detach(), grads_of(one)))
        (want, wanted), (got, grads) = found
        assert_close("loss", got, want, rel_l2=1e-6)
        assert sum("experts" in name and bool(grad.any()) for name, grad in grads.items()) == 8
        assert_grads(grads, wanted, 1e-5)
    with eager.disable_adapter(), model.disable_adapter(), torch.no_grad():
        off = loss_of(model)
        assert_close("off", off, loss_of(eager), rel_l2=1e-6)
    assert abs(off - got) > 1e-4, "adapters change the model"
    with torch.no_grad():
        assert_close("merged", loss_of(model.merge_and_unload()), got, rel_l2=1e-5)


def test_a_model_of_transformers_in_bfloat16() -> None:
    """Rounding of both is of one size: each is as far from float32."""
    exact = copy.deepcopy(causal("qwen3_moe", "eager"))
    loss_of(exact).backward()
    want, errors = grads_of(exact), {}
    for implementation in ("eager", "flashmoe"):
        model = copy.deepcopy(causal("qwen3_moe", implementation)).bfloat16()
        loss_of(model).backward()
        errors[implementation] = torch.stack(
            [
                (grad.float() - want[name]).norm() / want[name].norm()
                for name, grad in grads_of(model).items()
                if "experts" in name
            ]
        ).mean()
    assert errors["flashmoe"] < 1.5 * errors["eager"] < 0.3


class Net(nn.Module):
    """Always with the same parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.moe = FlashMoELayer(
            CONFIG, router=True, device="cpu", dtype=torch.float32, backend="reference"
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.moe(x)


def tokens(count: int = 16) -> torch.Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(2))


def step(model: nn.Module, x: torch.Tensor) -> Grads:
    model.zero_grad()
    model(x).square().mean().backward()
    return grads_of(model)


def test_what_adapters_cost() -> None:
    """A merged weight's full gradient for each adapted weight, and nothing for what is frozen."""
    model = adapted(Net(), target_parameters=["moe.fc1"])
    layer = model.base_model.model.moe.get_base_layer()
    counters = layer.backend.weight_grads
    grads = step(model, tokens())
    assert sorted(name.rsplit(".", 3)[-3] for name in grads) == ["lora_A", "lora_B"]
    assert (counters.computed, counters.left_out) == (1, 1)
    assert counters.buffer_bytes == layer.fc1.nbytes
    assert counters.row_bytes > 0
    model = adapted(Net(), target_parameters=["moe.router.weight"])
    layer = model.base_model.model.moe
    assert step(model, tokens())
    assert layer.backend.weight_grads == GradCounters(left_out=2)


@pytest.mark.parametrize("how", ["checkpointed", "bfloat16"])
def test_adapters_of_a_layer(how: str) -> None:
    """All three at once."""
    model = adapted(Net(), **WHERE)
    want = step(model, tokens())
    assert len(want) == 2 * 3
    assert all(grad.any() for grad in want.values())
    if how == "bfloat16":
        narrow = step(copy.deepcopy(model).bfloat16(), tokens().bfloat16())
        assert_grads({name: one.float() for name, one in narrow.items()}, want, 0.2)
        return
    model.zero_grad()
    x = tokens().requires_grad_()
    checkpoint(model, x, use_reentrant=False).square().mean().backward()
    assert_grads(grads_of(model), want, 1e-7)


def train_on_ranks(group: dist.ProcessGroup) -> tuple[Grads, torch.Tensor]:
    """Each rank has all experts, and its share of the tokens."""
    model = adapted(Net(), **WHERE)
    ddp = DistributedDataParallel(prepare_for_ddp(model, group), process_group=group)
    grads = step(ddp, tokens(16 * dist.get_world_size(group)).chunk(2)[dist.get_rank(group)])
    return grads, model.merge_and_unload()(tokens()).detach()


def test_data_parallel_ranks(two_ranks: RankPool) -> None:
    model = adapted(Net(), **WHERE)
    want = step(model, tokens(32))
    merged = model.merge_and_unload()(tokens()).detach()
    for grads, out in two_ranks.run(train_on_ranks):
        assert_grads(grads, want, 1e-5)
        assert torch.equal(out, merged)


def share_adapters(model: nn.Module) -> None:
    """Makes the adapters of experts that ranks share DTensors, as the page has it."""
    for module in model.modules():
        if isinstance(module, peft.tuners.lora.layer.ParamWrapper):
            mesh = module.get_param().device_mesh
            for linear in (*module.lora_A.values(), *module.lora_B.values()):
                shared = distribute_tensor(linear.weight.detach(), mesh, [Replicate()])
                linear.weight = nn.Parameter(shared)


def train_experts_on_ranks(group: dist.ProcessGroup) -> tuple[Grads, torch.Tensor]:
    """Each rank has half of the experts."""
    net = Net()
    torch.manual_seed(0)
    config = dataclasses.replace(CONFIG, num_ranks=2)
    net.moe = FlashMoELayer(
        config, group=group, router=True, device="cpu", dtype=torch.float32, backend="reference"
    )
    model = adapted(net, target_parameters=WHERE["target_parameters"])
    share_adapters(model)
    x = tokens(32).chunk(2)[dist.get_rank(group)]
    model(x).square().mean().backward()
    adapters = [one for one in model.parameters() if one.requires_grad]
    grads = {name: one.full_tensor() for name, one in grads_of(model).items()}
    assert net.moe.get_base_layer().backend.weight_grads.left_out == 0
    torch.optim.AdamW(adapters, lr=0.0).step()
    return grads, model.merge_and_unload()(x).detach()


def test_experts_on_several_ranks(two_ranks: RankPool) -> None:
    """Adapters' gradients are sums over the tokens of all ranks, as the experts' are."""
    model = adapted(Net(), target_parameters=WHERE["target_parameters"])
    model(tokens(32)).square().mean().mul(2).backward()  # each of two ranks has a mean
    want = grads_of(model)
    merged = model.merge_and_unload()(tokens(32)).detach().chunk(2)
    for rank, (grads, out) in enumerate(two_ranks.run(train_experts_on_ranks)):
        assert_grads(grads, want, 1e-5)
        assert_close("merged", out, merged[rank], rel_l2=1e-5)
