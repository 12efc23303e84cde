"""What mixes tokens without attention is refused in the first step where its arguments show it, and nothing else is.

Shapes: B batch, L tokens of this rank, D channels.
"""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_moe_strategy.context_parallel.adapt import adapt_attention
from lightning_moe_strategy.context_parallel.layout import contiguous, zigzag
from lightning_moe_strategy.context_parallel.scope import ContextParallel, LocalSequence
from lightning_moe_strategy.kernels.next_tokens import next_tokens

B, L, D = 2, 5, 6
WITH_DUMMY = zigzag(2 * (L - 1), 2).with_tail_token()
WITHOUT_DUMMY = contiguous(2 * L, 2)


class Group:
    """Two ranks, of which this process is the first: enough for what is refused before anything is gathered."""

    def rank(self):
        return 0

    def size(self):
        return 2


class Mixer(nn.Module):
    """A block of which every forward but attention is the function it was given."""

    def __init__(self, function):
        super().__init__()
        self.function, self.child = function, nn.Linear(1, 1)

    def forward(self, x_BLD):
        return self.function(x_BLD)


def run_step(in_block=None, in_step=None, token_wise=False, layout=WITHOUT_DUMMY):
    """One watched step that computes ``in_block(x_BLD)`` in a block and ``in_step(ids_BL)`` outside of all."""
    blocks = nn.ModuleList([Mixer(in_block or (lambda x: x))])
    cp = ContextParallel(Group())
    adapt_attention(blocks, {"blocks.0": blocks[0]}, cp)
    cp.token_wise_modules = ("blocks.0",) if token_wise else ()
    ids_BL = torch.arange(B * L).view(B, L)
    cp.sequence = LocalSequence(layout=layout, num_tokens=2 * L, position_ids_BL=ids_BL.clone(), token_ids_BL=ids_BL)
    try:
        with cp.step("train"):
            if in_step is not None:
                in_step(ids_BL)
            if in_block is not None:
                blocks[0](torch.randn(B, L, D))
    except RuntimeError as error:
        # The step's own end: this block attends to nothing and nobody read the positions.
        if not re.match("No attention call|The step never read", str(error)):
            raise


MIXING = {
    "roll": lambda x: torch.roll(x, 1, dims=1),
    "roll of a negative dim": lambda x: x.roll(-1, -2),
    "roll of two dims": lambda x: torch.roll(x, (1, 1), (1, 2)),
    "flip": lambda x: x.flip(1),
    "flip of a list": lambda x: torch.flip(x, [2, 1]),
    "cumsum": lambda x: x.cumsum(1),
    "cumprod": lambda x: torch.cumprod(x, dim=-2),
    "cummax": lambda x: x.cummax(dim=1),
    "cumsum of a mask": lambda x: (x[..., 0] > 0).cumsum(-1),
    "sort": lambda x: x.sort(dim=1),
    "sort of the last dim": lambda x: torch.sort(x[..., 0]),
    "argsort": lambda x: x.argsort(1, descending=True),
    "topk": lambda x: x.topk(2, dim=1),
    "mean": lambda x: x.mean(1),
    "mean in keywords": lambda x: torch.mean(x, dim=(1,), keepdim=True),
    "sum": lambda x: torch.sum(x, 1),
    "std": lambda x: x.std(1),
    "amax": lambda x: x.amax(dim=(1, 2)),
    "softmax": lambda x: F.softmax(x, dim=1),
    "log_softmax": lambda x: x.log_softmax(1),
    "logsumexp": lambda x: x.logsumexp(1),
}


@pytest.mark.parametrize("name", MIXING)
def test_a_block_that_mixes_tokens_is_named_with_what_it_did(name):
    with pytest.raises(ValueError, match=rf"blocks\.0 uses {name.split()[0]} along its tokens; cp=2 .*next_tokens"):
        run_step(in_block=MIXING[name])


INNOCENT = {
    "channels": lambda x: (x.mean(-1), x.sum(2), x.softmax(-1), x.cumsum(-1), x.roll(1, 2), x.flip(-1), x.std(2)),
    "last dim of sort and topk": lambda x: (x.sort(), x.topk(2), x.argsort(descending=True)),
    "everything there is": lambda x: (x.mean(), x.sum(), x.mean((0, 1)), x.sum(dim=(0, 1))),
    "batch": lambda x: (x.mean(0), x.flip(0), x.cumsum(0)),
    "tokens in one row": lambda x: (x.flatten(0, 1).sum(1), x.flatten(0, 1).cumsum(0), x.flatten(0, 1).sort(0)),
    "heads": lambda x: x.unflatten(-1, (3, 2)).transpose(1, 2).sum(1),
    "as many heads as tokens": lambda x: torch.zeros(B, L, L, 3).sum(1),
    "counts": lambda x: (x > 0).sum(1),
    "a norm": lambda x: F.layer_norm(x, (D,)),
}


@pytest.mark.parametrize("name", INNOCENT)
def test_what_mixes_no_tokens_passes(name):
    run_step(in_block=INNOCENT[name])


@pytest.mark.parametrize("name", MIXING)
def test_a_block_that_is_declared_token_wise_is_not_asked(name):
    run_step(in_block=MIXING[name], token_wise=True)


@pytest.mark.parametrize(
    "move",
    [
        lambda ids: ids.roll(-1, 1),
        lambda ids: torch.roll(ids.float(), 1, -1),
        lambda ids: ids.flip(1),
        lambda ids: (ids == 0).cumsum(1),
    ],
)
def test_an_order_of_tokens_outside_of_blocks_is_refused(move):
    with pytest.raises(RuntimeError, match=r"along the tokens of a tensor outside of every adapted block.*next_tokens"):
        run_step(in_step=move)


@pytest.mark.parametrize(
    "move",
    [
        lambda ids: ids[:, :-1],
        lambda ids: ids[..., 1:],
        lambda ids: ids.narrow(1, 0, L - 1),
        lambda ids: F.pad(ids, (1, -1)),
        lambda ids: torch.cat([ids.new_zeros(B, 1), ids], 1),
        lambda ids: ids.unfold(1, 2, 1),
    ],
)
def test_token_ids_beside_their_neighbours_are_refused(move):
    with pytest.raises(RuntimeError, match="token ids were moved along the sequence .an n-gram embedding.*next_tokens"):
        run_step(in_step=move)


def test_a_module_that_shifts_may_cut_off_its_dummy_and_nothing_else():
    def cut(ids_BL):
        return ids_BL[:, :-1]

    run_step(in_step=cut, layout=WITH_DUMMY)
    for move in (lambda ids: ids[:, 1:], lambda ids: torch.cat([ids.new_zeros(B, 1), cut(ids)], 1)):
        with pytest.raises(RuntimeError, match="token ids were moved"):
            run_step(in_step=move, layout=WITH_DUMMY)


def test_losses_and_looks_at_ids_pass_outside_of_blocks():
    def step(ids_BL):
        labels_BL, logits_BLV = ids_BL.clone(), torch.randn(B, L, B * L)
        assert ids_BL[:, 0].shape == ids_BL[:, -1].shape == (B,)
        ids_BL[:, :1], ids_BL[:, :2], ids_BL[0], ids_BL[:, None], ids_BL.view(-1), torch.cat([ids_BL, ids_BL])
        F.cross_entropy(logits_BLV[:, :-1].flatten(0, 1), labels_BL[:, 1:].flatten(), reduction="none").mean()
        F.pad(labels_BL[:, 1:], (0, 1), value=-100), logits_BLV.mean(1), logits_BLV.softmax(-1), ids_BL.sum(1)

    run_step(in_step=step)


def test_next_tokens_outside_of_blocks_is_refused():
    with pytest.raises(RuntimeError, match="next_tokens was called outside of every adapted block.*ModuleList"):
        run_step(in_step=lambda ids: next_tokens(ids, 1, 0))


def test_next_tokens_without_positions_does_not_guess_at_packed_documents():
    block = Mixer(lambda x: next_tokens(x, 1, 0))
    cp = ContextParallel(Group())
    adapt_attention(nn.ModuleList([block]), {"blocks.0": block}, cp)
    positions_BL = torch.zeros(B, L, dtype=torch.long)
    cp.sequence = LocalSequence(
        layout=WITHOUT_DUMMY, num_tokens=2 * L, position_ids_BL=positions_BL, documents=((0, 3),)
    )
    with pytest.raises(ValueError, match=r"blocks\.0 uses next_tokens on a batch that marks packed documents"):
        block(torch.zeros(B, L))


def test_the_multi_token_prediction_of_transformers_is_refused_by_name():
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_layers import MtpModel

    from tests.modules import tiny_hf_config

    model = transformers.AutoModelForCausalLM.from_config(tiny_hf_config("deepseek_v3", num_mtp_layers=1))
    with pytest.raises(ValueError, match=r"0 \(MtpModel\) predicts several tokens ahead.*mtp_layers of MoELanguage"):
        adapt_attention(nn.ModuleList([MtpModel(model, 1)]), {}, ContextParallel(Group()))
