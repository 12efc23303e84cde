"""A long document on cp ranks: equal work for all, a quarter of the memory of one process, nothing quadratic.

Peak tensor bytes are those of ``simulation.memory.MemoryWatch``: the storages of all tensors that live at one moment of
the step, parameters, gradients, optimizer state and batch included, without what a kernel allocates inside itself.

Shapes: S tokens of the document, L of one rank, V vocabulary.
"""

import math
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import Callback
from torch.utils.data import DataLoader

from benchmarks.zigzag_balance import num_pairs
from lightning_moe_strategy._torch_compat import OperationMode, tensors_in
from lightning_moe_strategy.context_parallel.layout import contiguous, zigzag
from lightning_moe_strategy.context_parallel.softmax import causal_attention
from lightning_moe_strategy.models.data import TextDataModule
from lightning_moe_strategy.models.lightning_module import HFCausalLM
from lightning_moe_strategy.simulation.watch import StepWatch
from tests.parity import fit

NUM_TOKENS, VOCABULARY = 131_072, 1024
DEGREES = {1: dict(fsdp=1, cp=1, e_fsdp=1, ep=1), 4: dict(fsdp=1, cp=4, e_fsdp=1, ep=4)}

HYBRID: dict[str, Any] = dict(
    model_type="qwen3_next", vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2,
    layer_types=["linear_attention", "full_attention"], num_attention_heads=1, num_key_value_heads=1, head_dim=16,
    linear_num_key_heads=1, linear_num_value_heads=1, linear_key_head_dim=16, linear_value_head_dim=16,
    linear_conv_kernel_dim=4, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
    shared_expert_intermediate_size=16, max_position_embeddings=NUM_TOKENS, pad_token_id=None, bos_token_id=None,
    eos_token_id=None,
)  # fmt: skip

TOLERANCE = 1e-4
"""Norm of a gradient's error over its norm: both runs add up 131,072 tokens in FP32, in other orders."""
LOOSER = {"A_log": 1e-2, "dt_bias": 1e-2}
"""One number per head: a sum over all tokens that largely cancels."""


BLOCKS_AT_MOST = 0.36
"""Of the blocks' own peak at cp 1. It is in the layer of linear attention, which keeps the tensors of two scans where
one process keeps those of one: the first finds what its chunks make of a state."""


class LargestTensor(OperationMode):
    """The largest tensor, by elements, that any operation returns below autograd."""

    shape: tuple[int, ...] = ()

    def run(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = operation(*args, **kwargs)
        self.shape = max([self.shape, *(tuple(tensor.shape) for tensor in tensors_in(result))], key=math.prod)
        return result


class WatchStep(Callback):
    """Peak bytes by part of the one step of a fit, and the largest tensor.

    Between the loss and the optimizer, "backward" is that of loss and head, whose logits outgrow all the rest of so
    small a model, and "blocks" is what follows, recompute included.
    """

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.watch, self.largest = StepWatch(trainer.strategy.placement), LargestTensor()
        self.opened, self.phase = ExitStack(), ExitStack()
        self.opened.enter_context(
            self.watch.opened(
                parameters=pl_module.parameters(), optimizer_state=(), others=[*pl_module.buffers(), *batch.values()]
            )
        )
        self.opened.enter_context(self.largest)
        last_block = pl_module.model.model.layers[-1]
        self.opened.callback(last_block.register_full_backward_pre_hook(lambda *_: self.enter("blocks")).remove)
        self.enter("forward")

    def enter(self, phase: Any) -> None:
        self.phase.close()
        self.phase.enter_context(self.watch.phase(phase))

    def on_before_backward(self, *args: Any) -> None:
        self.enter("backward")

    def on_before_optimizer_step(self, *args: Any) -> None:
        self.enter("optimizer")

    def on_train_batch_end(self, *args: Any) -> None:
        self.phase.close()
        self.opened.close()


def one_document(folder: str) -> DataLoader:
    """The first rows of the default corpus, which has no single text as long: attention runs through all of it."""
    data = TextDataModule(vocab_size=VOCABULARY, sequence_length=NUM_TOKENS, batch_size=1, cache_dir=folder)
    return DataLoader(data.train_dataloader().dataset, batch_size=1)


def train(degree: int, folder: str) -> dict[str, Any]:
    watch = WatchStep()
    trainer, _, keep = fit(
        DEGREES[degree] | {"recompute": "block"},
        lambda: HFCausalLM(HYBRID, warmup_steps=0),
        lambda dp: one_document(folder),
        callbacks=(watch,),
    )
    return {
        "peaks": {phase: peak.num_bytes for phase, peak in watch.watch.memory.peaks.items()},
        "largest": watch.largest.shape,
        "loss": float(trainer.callback_metrics["train_loss"]),
        "gradients": keep.steps[0],
    }


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_131072_tokens_train_on_four_ranks_in_a_quarter_of_the_memory(ranks1, ranks4, tmp_path):
    one_document(str(tmp_path))  # tokens are made once, not by four ranks
    (one,), four = ranks1(train, 1, str(tmp_path)), ranks4(train, 4, str(tmp_path))
    ratio = max(peak(rank) for rank in four) / peak(one)
    of_blocks = max(rank["peaks"]["blocks"] for rank in four) / one["peaks"]["blocks"]
    print(f"{one['peaks']} at cp 1, {four[0]['peaks']} at cp 4: {ratio:.4f}, of the blocks alone {of_blocks:.4f}")
    assert ratio < 0.30
    assert of_blocks < BLOCKS_AT_MOST
    for rank in (one, *four):
        num_local = NUM_TOKENS if rank is one else NUM_TOKENS // 4
        assert math.prod(rank["largest"]) <= num_local * VOCABULARY, "the logits are not the largest tensor"
        assert abs(rank["loss"] - one["loss"]) < 1e-5
    for name, expected in one["gradients"].items():
        error = float((four[0]["gradients"][name] - expected).norm() / expected.norm())
        assert error < LOOSER.get(name.rpartition(".")[2], TOLERANCE), (name, error)


def peak(rank: dict[str, Any]) -> int:
    return max(rank["peaks"].values())


def largest_of_attention(num_tokens: int) -> tuple[int, ...]:
    layout, group = zigzag(num_tokens, dist.get_world_size()), dist.group.WORLD
    q, k, v = (torch.randn(1, 2, layout.tokens_per_rank, 8, requires_grad=True) for _ in range(3))
    with LargestTensor() as largest:
        causal_attention(q, k, v, layout=layout, group=group).sum().backward()
    return largest.shape


def test_attention_has_no_tensor_larger_than_keys_and_the_watch_would_see_a_mask(ranks2):
    assert ranks2(largest_of_attention, 512) == [(512, 1, 2, 8)] * 2
    q = torch.randn(1, 2, 512, 8)
    with LargestTensor() as largest:
        F.scaled_dot_product_attention(q, q, q, torch.ones(512, 512, dtype=torch.bool).tril())
    assert largest.shape == (512, 512)


@pytest.mark.parametrize("degree", [2, 4, 8, 64])
def test_a_document_costs_every_rank_the_same_pairs(degree):
    balanced = num_pairs(zigzag(NUM_TOKENS, degree), [0])
    assert max(balanced) <= 1.001 * sum(balanced) / degree
    uneven = num_pairs(contiguous(NUM_TOKENS, degree), [0])
    assert sum(uneven) == sum(balanced) == NUM_TOKENS * (NUM_TOKENS + 1) // 2
    assert max(uneven) / (sum(uneven) / degree) == pytest.approx(2 - 1 / degree, rel=1e-3)
