"""Sparse latent attention in one process: equal to what is published, and to dense attention once it sees all keys."""

import dataclasses

import pytest
import torch
from torch import nn

from lightning_moe_strategy._torch_compat import fake_tensors
from lightning_moe_strategy.kernels import key_selection
from lightning_moe_strategy.models import sparse_attention
from lightning_moe_strategy.models.attention import MultiHeadLatentAttention
from lightning_moe_strategy.models.config import PRESETS, ModelConfig
from lightning_moe_strategy.models.sparse_attention import SparseLatentAttention
from lightning_moe_strategy.models.transformer import MoETransformer
from tests.test_key_selection import Sizes
from tests.test_models_transformer import DEEPSEEK_NAMES, OURS, assert_equal_to_hugging_face

NUM_TOKENS, HIDDEN = 15, 48
DSA = ModelConfig(
    hidden=HIDDEN,
    attention="mla",
    heads=3,
    q_lora=20,
    kv_lora=12,
    nope_head_dim=14,
    rope_head_dim=6,
    v_head_dim=22,
    index_heads=16,
    index_head_dim=10,
    index_top_k=4,
    index_skip_first=1,
)
DSA_PLAIN_QUERY = dataclasses.replace(DSA, q_lora=None)
KINDS = pytest.mark.parametrize("config", [DSA, DSA_PLAIN_QUERY], ids=["query latent", "plain query"])


def make_attention(config, has_indexer=True):
    torch.manual_seed(0)
    attention = SparseLatentAttention(config, has_indexer=has_indexer)
    for parameter in attention.parameters():
        nn.init.normal_(parameter, std=0.3)
    return attention


def make_input():
    return torch.randn(2, NUM_TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1))


POSITIONS = torch.arange(NUM_TOKENS)[None]


@KINDS
def test_with_every_key_selected_it_is_dense_latent_attention(config):
    sparse = make_attention(dataclasses.replace(config, index_top_k=NUM_TOKENS + 3))
    dense = MultiHeadLatentAttention(dataclasses.replace(config, index_heads=0))
    dense.load_state_dict({n: x for n, x in sparse.state_dict().items() if not n.startswith("indexer.")})
    x_sparse, x_dense = make_input().requires_grad_(), make_input().requires_grad_()
    out, key_ids = sparse(x_sparse, POSITIONS)
    expected = dense(x_dense, POSITIONS)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    assert key_ids.sort(-1).values[0, -1].tolist() == list(range(NUM_TOKENS))
    for output in (out, expected):
        (output * torch.randn(output.shape, generator=torch.Generator().manual_seed(2))).sum().backward()
    ours = {name: parameter.grad for name, parameter in sparse.named_parameters() if parameter.requires_grad}
    theirs = {name: parameter.grad for name, parameter in dense.named_parameters()}
    assert ours.keys() == theirs.keys()
    for name, grad in (ours | {"x": x_sparse.grad}).items():
        other = (theirs | {"x": x_dense.grad})[name]
        assert (grad - other).norm() < 1e-5 * other.norm(), name


def test_a_model_with_a_shared_layer_equals_glm_moe_dsa_with_every_gradient():
    """Three layers: the first and the last select, the one between shares; 4 of up to 19 keys."""
    config = dataclasses.replace(
        PRESETS["glm-5.2"],
        **{name: getattr(OURS, name) for name in ("vocab_size", "hidden", "intermediate", "layers", "heads")},
        moe_intermediate=24,
        top_k=3,
        dense_first_layers=1,
        q_lora=20,
        kv_lora=12,
        nope_head_dim=14,
        rope_head_dim=6,
        v_head_dim=22,
        num_experts=8,
        index_heads=16,
        index_head_dim=10,
        index_top_k=4,
        index_every=2,
        index_skip_first=1,
        rope_theta=1e4,
    )
    assert config.indexer_layers == (0, 2)
    sizes = {
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "q_lora_rank": 20,
        "kv_lora_rank": 12,
        "qk_nope_head_dim": 14,
        "qk_rope_head_dim": 6,
        "v_head_dim": 22,
        "index_n_heads": 16,
        "index_head_dim": 10,
        "index_topk": 4,
        "indexer_types": ["full", "shared", "full"],
        "num_key_value_heads": 6,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    }
    names = DEEPSEEK_NAMES | {".indexer.q_proj.": ".indexer.wq_b.", ".indexer.k_proj.": ".indexer.wk."}
    assert_equal_to_hugging_face(config, "GlmMoeDsaConfig", sizes, names)


def test_a_layer_without_indexer_attends_to_the_keys_it_is_given():
    attention = make_attention(DSA, has_indexer=False)
    x_BSD = make_input()
    with pytest.raises(ValueError, match="no indexer of its own: pass the key_ids_BSK of the layer before"):
        attention(x_BSD, POSITIONS)
    own = torch.arange(NUM_TOKENS, dtype=torch.int32).expand(2, NUM_TOKENS)[..., None]
    out, handed_on = attention(x_BSD, POSITIONS, own)
    assert handed_on is own
    # A query that sees itself alone returns its own value.
    values = attention.expand(*attention.latent(x_BSD, (torch.ones(1), torch.zeros(1))))[1]
    torch.testing.assert_close(out, attention.o_proj(values.transpose(1, 2).flatten(2)), rtol=1e-5, atol=1e-5)


@KINDS
def test_the_indexer_is_frozen_and_everything_else_gets_a_gradient(config):
    attention = make_attention(config)
    x_BSD = make_input().requires_grad_()
    out, key_ids = attention(x_BSD, POSITIONS)
    assert key_ids.shape == (2, NUM_TOKENS, 4) and not key_ids.requires_grad
    out.square().sum().backward()
    for name, parameter in (*attention.named_parameters(), ("x", x_BSD)):
        if name.startswith("indexer."):
            assert not parameter.requires_grad and parameter.grad is None
        else:
            assert parameter.grad.isfinite().all() and parameter.grad.any(), name


@KINDS
def test_only_differences_of_positions_matter(config):
    attention, x_BSD = make_attention(config), make_input()
    out, key_ids = attention(x_BSD, POSITIONS)
    moved, same_ids = attention(x_BSD, POSITIONS + 13)
    assert torch.equal(same_ids, key_ids)
    torch.testing.assert_close(moved, out, rtol=1e-4, atol=1e-5)
    assert not torch.equal(attention(x_BSD, POSITIONS.flip(-1))[1], key_ids), "the indexer ignores positions"


def test_a_later_token_changes_nothing_before_it_when_few_keys_are_selected():
    config = dataclasses.replace(PRESETS["tiny-dsa"], index_top_k=3, index_heads=16)
    torch.manual_seed(0)
    model, input_ids_BS = MoETransformer(config), torch.randint(1024, (2, 11))
    changed_BS = input_ids_BS.clone()
    changed_BS[:, 7] = (changed_BS[:, 7] + 1) % 1024
    before_BSV, after_BSV = model(input_ids_BS), model(changed_BS)
    torch.testing.assert_close(after_BSV[:, :7], before_BSV[:, :7], rtol=1e-6, atol=1e-6)
    assert (after_BSV[:, 7] - before_BSV[:, 7]).abs().max() > 1e-5


def test_blocks_share_one_tensor_of_keys_until_the_next_indexer():
    model = MoETransformer(PRESETS["tiny-dsa"])
    seen = []
    for block in model.layers:
        block.register_forward_hook(lambda module, args, output: seen.append((args[2], output[1])))
    model(torch.randint(1024, (1, 20)))
    (none, first), (given, shared), (_, second), (given_again, shared_again) = seen
    assert none is None and given is shared is first and given_again is shared_again is second
    assert second is not first and first.shape == (1, 20, 16) and first.dtype == torch.int32


@pytest.mark.parametrize("autocast", [False, True])
def test_head_weights_are_fp32_products_in_a_bf16_model(autocast, monkeypatch):
    indexer = make_attention(DSA_PLAIN_QUERY).indexer
    x_BSD, recorded = make_input(), []
    if not autocast:
        indexer, x_BSD = indexer.bfloat16(), x_BSD.bfloat16()

    def record(query, key, weights, **options):
        recorded.append(weights)
        return key_selection.select_keys(query, key, weights, **options)

    monkeypatch.setattr(sparse_attention, "select_keys", record)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        indexer(x_BSD, x_BSD, POSITIONS)
    exact = x_BSD.double() @ indexer.weights_proj.weight.double().T * (16 * 10) ** -0.5
    assert recorded[0].dtype == torch.float32
    torch.testing.assert_close(recorded[0].double(), exact, rtol=1e-5, atol=1e-6)


def test_attention_over_shapes_alone_makes_no_tensor_of_tokens_heads_and_keys():
    config = dataclasses.replace(PRESETS["tiny-dsa"], heads=8)
    attention = SparseLatentAttention(config, has_indexer=True)
    num_tokens = 1024
    with fake_tensors():
        attention = SparseLatentAttention(config, has_indexer=True)
        x_BSD = torch.empty(1, num_tokens, config.hidden, requires_grad=True)
        with Sizes() as sizes:
            attention(x_BSD, torch.arange(num_tokens)[None])[0].sum().backward()
    largest = config.heads * (config.kv_lora + config.rope_head_dim) * num_tokens
    assert sizes.largest == largest < num_tokens * num_tokens
