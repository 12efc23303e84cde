"""Hugging Face models: what travels, what is refused and how it is said. Parity: test_zigzag.py."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lightning_moe_strategy.context_parallel.adapt import adapt_attention
from lightning_moe_strategy.context_parallel.layout import zigzag
from lightning_moe_strategy.context_parallel.scope import ContextParallel, LocalSequence
from tests.test_zigzag import LATENT, hugging_face_model
from tests.traffic import noted_traffic


class Group:
    """Two ranks, of which this process is the first: enough for what is refused before anything is gathered."""

    def rank(self):
        return 0

    def size(self):
        return 2


def split_for(cp, num_tokens=8, shift="model", mask=None):
    layout = zigzag(num_tokens, cp.degree)
    own = layout.token_ids(cp.rank)[None]
    cp.sequence = LocalSequence(
        layout=layout,
        num_tokens=num_tokens,
        position_ids_BL=own,
        shift=shift,
        shift_labels_BL=own,
        attention_mask_BL=mask,
    )
    return own


def adapted(kind="qwen3_moe", change=None, group=None):
    model, blocks = hugging_face_model(kind)
    if change is not None:
        change(model)
    cp = ContextParallel(group or Group())
    adapt_attention(model, blocks, cp)
    return model, cp


def gathered_channels(kind, checkpointed):
    """Channels per token of every all-gather in one forward and backward pass, per layer."""
    channels = []
    model, cp = adapted(kind, group=dist.group.WORLD)
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    ids = split_for(cp)
    with noted_traffic(lambda x: channels.append(x[0, 0].numel())):
        out = model(input_ids=ids, labels=ids)
        in_forward = len(channels)
        out.loss.backward()
    return channels[:in_forward], channels[in_forward:]


def test_latent_attention_gathers_one_latent_and_rope_key_per_token(ranks2):
    per_layer = [LATENT["kv_lora_rank"] + LATENT["qk_rope_head_dim"]]
    assert ranks2(gathered_channels, "deepseek_v3", False) == [(per_layer * 2, per_layer * 2)] * 2
    assert ranks2(gathered_channels, "deepseek_v3", True) == [(per_layer * 2, per_layer * 2)] * 2


def test_grouped_query_attention_gathers_keys_and_values_once_per_pass(ranks2):
    per_layer = [2 * 8, 2 * 8]  # key heads, head dim
    assert ranks2(gathered_channels, "qwen3_moe", False) == [(per_layer * 2, per_layer * 2)] * 2
    assert ranks2(gathered_channels, "qwen3_moe", True) == [(per_layer * 2, per_layer * 2)] * 2


def test_classes_and_masks_of_transformers_stay_as_they_are():
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    before, _ = hugging_face_model("qwen3_moe")
    model, _ = adapted()
    assert "fsdp_cp_ep" not in ALL_MASK_ATTENTION_FUNCTIONS
    assert [type(module) for module in model.modules()] == [type(module) for module in before.modules()]
    assert all("forward" not in module.__dict__ for module in model.modules())


def with_config(**values):
    def change(model):
        for name, value in values.items():
            setattr(model.config, name, value)

    return change


def with_attribute(name, value):
    def change(model):
        setattr(model.model.layers[1].self_attn, name, value)

    return change


class Indexer(nn.Module):
    pass


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (with_attribute("attention_dropout", 0.1), r"layers\.1\.self_attn has attention_dropout\(0\.1\).*=0\.0"),
        (with_attribute("is_causal", False), r"layers\.1\.self_attn has is_causal=False"),
        (with_attribute("indexer", Indexer()), r"layers\.1\.self_attn\.indexer .*does not read latents"),
        (with_attribute("conv1d", nn.Conv1d(8, 8, 4)), r"layers\.1\.self_attn\.conv1d is a convolution over tokens"),
        (with_config(layer_types=["full_attention", "linear_attention"]), r"layer_types \['linear_attention'\]"),
        (with_config(layer_types=["chunked_attention"]), r"layer_types \['chunked_attention'\]"),
        (with_config(output_router_logits=True), r"router_aux_loss_coef=0\.001.*output_router_logits=False"),
        (with_config(rope_parameters={"rope_type": "dynamic"}), r"rope_type 'dynamic'"),
        (with_config(is_encoder_decoder=True), r"is_encoder_decoder=True"),
    ],
)
def test_a_model_that_cannot_be_split_is_refused_before_training(change, message):
    with pytest.raises(ValueError, match=message):
        adapted(change=change)


def test_router_loss_with_coefficient_zero_is_no_reason_to_refuse():
    adapted(change=with_config(output_router_logits=True, router_aux_loss_coef=0.0))


def test_a_model_without_the_attention_registry_is_refused():
    model, blocks = hugging_face_model("qwen3_moe")
    no = classmethod(lambda cls: False)
    model.__class__ = type("Own", (type(model),), {"_can_set_attn_implementation": no})
    with pytest.raises(ValueError, match=r"Own\) does not take its attention from transformers' registry"):
        adapt_attention(model, blocks, ContextParallel(Group()))


def test_a_window_that_only_the_mask_knows_is_refused():
    model, cp = adapted("qwen3_moe", change=with_config(sliding_window=6, layer_types=["sliding_attention"] * 2))
    ids = split_for(cp, num_tokens=8)
    with pytest.raises(ValueError, match=r"sliding window of 6 in its config.*asks its attention for None"):
        model(input_ids=ids)


def forward_with_large_window():
    model, cp = adapted("mixtral", change=with_config(sliding_window=8), group=dist.group.WORLD)
    return model(input_ids=split_for(cp, num_tokens=8)).logits.shape


def test_a_window_as_long_as_the_sequence_is_full_attention(ranks2):
    assert ranks2(forward_with_large_window) == [(1, 4, 97)] * 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(attention_mask=torch.tensor([[0, 1, 1, 1]])), "attention_mask of its own making"),
        (dict(cache=object()), "generation with a cache"),
        (dict(output_router_logits=True), r"router_aux_loss_coef=0\.001"),
    ],
)
def test_arguments_that_a_part_of_a_sequence_cannot_honour_are_refused(arguments, message):
    model, cp = adapted()
    ids = split_for(cp)
    with pytest.raises(ValueError, match=message):
        model(input_ids=ids, **arguments)


def test_labels_for_a_model_that_shifts_need_that_shift():
    model, cp = adapted()
    ids = split_for(cp, shift="none")
    with pytest.raises(ValueError, match=r"shift='none'.*shift='model'"):
        model(input_ids=ids, labels=ids)


def test_positions_counted_from_zero_are_refused_in_the_first_step():
    model, cp = adapted()
    ids = split_for(cp)
    with pytest.raises(ValueError, match="not those of this rank's tokens"):
        with cp.step("train"):
            model(input_ids=ids, position_ids=torch.arange(4)[None])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(softcap=30.0), "a cap on attention scores"),
        (dict(indices=torch.zeros(4)), "a sparse choice of keys"),
    ],
)
def test_what_a_layer_asks_of_its_attention_is_checked(options, message):
    model, cp = adapted()
    ids = split_for(cp)
    with pytest.raises(ValueError, match=rf"model\.layers\.0 uses {message}"):
        model(input_ids=ids, **options)


def test_marks_of_documents_that_the_batch_does_not_have_are_refused():
    model, cp = adapted()
    ids = split_for(cp)
    with pytest.raises(ValueError, match="cu_seq_lens_q that the batch does not have"):
        model(input_ids=ids, cu_seq_lens_q=torch.tensor([0, 4]))


def layer_without_its_model():
    model, cp = adapted("deepseek_v3", group=dist.group.WORLD)
    plain, _ = hugging_face_model("deepseek_v3")
    plain.set_attn_implementation("sdpa")  # without a mask causal, other than "eager"
    own, x = split_for(cp), torch.randn(1, 8, 32)
    positions = plain.model.rotary_emb(x, torch.arange(8)[None])
    expected = plain.model.layers[0](x, position_embeddings=positions)
    angles = model.model.rotary_emb(x, own)
    out = model.model.layers[0](x[:, own[0]], position_embeddings=angles)
    return float((out - expected[:, own[0]]).abs().max())


def test_a_latent_layer_needs_no_cache_from_its_model(ranks2):
    """So a layer may be called, or recomputed, by anybody."""
    assert max(ranks2(layer_without_its_model)) < 1e-5


def test_a_model_outside_of_a_step_says_what_is_missing():
    model, _ = adapted()
    with pytest.raises(RuntimeError, match=r"no batch was split.*ZigZagContextParallel"):
        model(input_ids=torch.ones(1, 4, dtype=torch.int64))


def test_sparse_attention_gathers_latents_and_the_keys_of_indexers_alone(ranks2):
    """GLM-5.2's pattern: a layer that shares the choice of the one before gathers no keys of an indexer."""
    assert ranks2(gathered_per_layer) == [[["index key", "latent"], ["latent"]] * 2] * 2


def gathered_per_layer():
    from tests.families import make_model

    model = make_model("glm_moe_dsa")
    cp = ContextParallel(dist.group.WORLD)
    adapt_attention(model, {f"model.layers.{i}": layer for i, layer in enumerate(model.model.layers)}, cp)
    config, layers = model.config, []
    names = {config.index_head_dim: "index key", config.kv_lora_rank + config.qk_rope_head_dim: "latent"}
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda *_: layers.append([]))
    with noted_traffic(lambda x: layers[-1].append(names[x.shape[-1]])):
        model(input_ids=split_for(cp, num_tokens=16))
    return layers


def test_an_adapted_value_projection_is_refused():
    from tests.families import make_model

    model = make_model("deepseek_v32")
    model.model.layers[1].self_attn.kv_b_proj = nn.Sequential(model.model.layers[1].self_attn.kv_b_proj)
    with pytest.raises(ValueError, match=r"layers\.1\.kv_b_proj is Sequential.*plain Linear"):
        blocks = {f"model.layers.{i}": layer for i, layer in enumerate(model.model.layers)}
        adapt_attention(model, blocks, ContextParallel(Group()))


def test_an_indexer_that_scores_in_another_way_is_refused():
    from tests.families import make_model

    model = make_model("deepseek_v32")
    cp = ContextParallel(Group())
    adapt_attention(model, {f"model.layers.{i}": layer for i, layer in enumerate(model.model.layers)}, cp)
    ids = split_for(cp)
    indexer = model.model.layers[0].self_attn.indexer
    indexer.__dict__["_context_parallel_forward"].forward = lambda hidden_states, *args, **kwargs: hidden_states
    with pytest.raises(RuntimeError, match=r"model\.layers\.0\.indexer multiplied 0 times"):
        model(input_ids=ids)


@pytest.mark.parametrize(
    ("options", "asked"),
    [({"s_aux": torch.zeros(4)}, "s_aux"), ({"sliding_window": 4}, "sliding_window"), ({}, "no chosen")],
)
def test_sparse_attention_with_sinks_a_window_or_no_choice_is_refused(options, asked):
    from tests.families import make_model

    model = make_model("deepseek_v32")
    cp = ContextParallel(Group())
    adapt_attention(model, {f"model.layers.{i}": layer for i, layer in enumerate(model.model.layers)}, cp)
    split_for(cp)
    module = model.model.layers[0].self_attn
    indices = {} if asked == "no chosen" else {"indices": torch.zeros(1, 4, 2, dtype=torch.int32)}
    with pytest.raises(ValueError, match=rf"model\.layers\.0 is sparse attention \(DSA\) with {asked}"):
        ALL_ATTENTION_FUNCTIONS["fsdp_cp_ep"](
            module,
            torch.zeros(1, 4, 4, 24),
            torch.zeros(1, 1, 4, 20),
            torch.zeros(1, 1, 4, 12),
            None,
            **indices,
            **options,
        )
