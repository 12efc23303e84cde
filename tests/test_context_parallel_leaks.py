"""Packed documents do not see each other on cp ranks, layer kind by layer kind (P3 of the project's invariants).

One probe looks forward (change a token of a document, compare the logits of the others), one backward (the gradient
that a document's logits give to the embeddings of the others). Both see the leak when the marks of the documents are
taken away.

Shapes: B sequences, S tokens of each, L tokens of this rank, D channels, V vocabulary.
"""

import pytest
import torch
from torch import nn

from lightning_moe_strategy.callbacks.zigzag import ZigZagContextParallel
from lightning_moe_strategy.context_parallel.adapt import adapt_attention
from lightning_moe_strategy.models.config import ModelConfig
from lightning_moe_strategy.models.transformer import MoETransformer
from lightning_moe_strategy.units import find_blocks
from tests.families import VOCABULARY, make_model
from tests.test_zigzag import attach

LENGTHS = [[11, 9, 10], [5, 19, 6]]
"""Of the three documents in each of two sequences. Chunks have 8 tokens (cp 2) or 4 (cp 4), the last ones two of them
padding: a document begins inside of a chunk, on an edge, and reaches over several."""

NUM_TOKENS, MIDDLE = 30, 1

VISIBLE, ROUNDING = 0.1, 1e-4
"""Sums over the tokens and channels of a document. Rounding is not zero: how many rows an expert multiplies together
decides in which order a product is summed. A gradient has no such excuse."""

HUGGING_FACE = {
    "softmax": "qwen3_moe",
    "window": "mixtral",
    "window with sinks": "gpt_oss",
    "latent": "deepseek_v3",
    "sparse": "deepseek_v32",
    "sparse, shared choice": "glm_moe_dsa",
    "gated delta rule and convolution": "qwen3_next",
    "the same, other projections": "qwen3_5_moe_text",
    "kimi delta attention, convolution and latent": "kimi_linear",
}
OURS = {
    "our softmax": {"heads": 4, "kv_heads": 2},
    "our latent": {"preset": "tiny-mla"},
    "our sparse": {"preset": "tiny-dsa", "index_heads": 12, "index_top_k": 5},
}


def make(kind):
    if kind in HUGGING_FACE:
        return make_model(HUGGING_FACE[kind])
    torch.manual_seed(3)
    model = MoETransformer(ModelConfig.resolve(OURS[kind] | {"vocab_size": VOCABULARY, "hidden": 32}))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model


def make_batch(is_marked):
    generator = torch.Generator().manual_seed(2)
    ids_BS = torch.randint(1, VOCABULARY, (len(LENGTHS), NUM_TOKENS), generator=generator)
    positions_BS = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in LENGTHS])
    batch = {"input_ids": ids_BS, "shift_labels": ids_BS.clone()}
    return batch | ({"position_ids": positions_BS} if is_marked else {})


def documents_BS():
    """Number of the document of every token; the padding of the split belongs to the last one."""
    rows = [torch.tensor([0, 1, 2]).repeat_interleave(torch.tensor(row)) for row in LENGTHS]
    return torch.nn.functional.pad(torch.stack(rows), (0, -NUM_TOKENS % 8), value=2)


class Probe:
    """A model on this rank's part of the batch."""

    def __init__(self, kind, is_marked):
        self.model, self.batch = make(kind), make_batch(is_marked)
        self.callback = ZigZagContextParallel(documents="separate")
        self.cp = attach(self.callback, self.model).context_parallel
        adapt_attention(self.model, find_blocks(self.model), self.cp)
        embedding = next(module for module in self.model.modules() if hasattr(module, "weight"))
        embedding.register_forward_hook(self._keep)

    def _keep(self, module, args, embedded_BLD):
        embedded_BLD.retain_grad()
        self.embedded_BLD = embedded_BLD

    def logits(self, changed_document=None):
        ids_BS = self.batch["input_ids"].clone()
        if changed_document is not None:
            # Its last token: what the next document would see most of.
            for row, lengths in zip(ids_BS, LENGTHS, strict=True):
                last = sum(lengths[: changed_document + 1]) - 1
                row[last] = row[last] % (VOCABULARY - 1) + 1
        local = self.callback.split(self.batch | {"input_ids": ids_BS}, "train")
        with self.cp.step("train"):
            if isinstance(self.model, MoETransformer):
                return self.model(local["input_ids"], local["position_ids"])
            return self.model(local["input_ids"], position_ids=local["position_ids"]).logits


def probe(kind, is_marked):
    """What this rank sees, each a sum over the tokens of every document: gradients that the logits of the middle one
    give to embeddings, changes of logits after one of a token of the first document, after one of the middle."""
    probe = Probe(kind, is_marked)
    logits_BLV = probe.logits()
    own_L = probe.cp.layout.token_ids(probe.cp.rank)
    documents_BL = documents_BS()[:, own_L]
    weights_BSV = torch.randn(*documents_BS().shape, VOCABULARY, generator=torch.Generator().manual_seed(4))
    (logits_BLV * weights_BSV[:, own_L] * (documents_BL == MIDDLE)[..., None]).sum().backward()
    seen = [probe.embedded_BLD.grad, *(probe.logits(document) - logits_BLV for document in (0, MIDDLE))]
    return torch.stack(
        [torch.stack([x.detach()[documents_BL == document].abs().sum() for document in range(3)]) for x in seen]
    )


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("kind", [*HUGGING_FACE, *OURS])
def test_a_document_sees_itself_and_no_other(kind, degree, request):
    ranks = request.getfixturevalue(f"ranks{degree}")
    gradient, first_changed, middle_changed = sum(ranks(probe, kind, True)).tolist()
    assert gradient[0] == gradient[2] == 0 < gradient[MIDDLE]
    assert first_changed[0] > VISIBLE and max(first_changed[1:]) < ROUNDING, first_changed
    assert middle_changed[1] > VISIBLE and max(middle_changed[::2]) < ROUNDING, middle_changed


@pytest.mark.parametrize("kind", [*HUGGING_FACE, *OURS])
def test_without_marks_the_probes_see_the_leak(kind, ranks2):
    gradient, first_changed, middle_changed = sum(ranks2(probe, kind, False)).tolist()
    assert gradient[0] > VISIBLE and gradient[2] == 0
    assert min(first_changed[:2]) > VISIBLE and min(middle_changed[1:]) > VISIBLE
    assert middle_changed[0] < ROUNDING, "a later token changed an earlier document"
