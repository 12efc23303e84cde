"""The router selects and weighs as it says, in FP32; experts compute the weighted sum of their MLPs."""

import pytest
import torch
import torch.nn.functional as F

from lightning_moe_strategy.models.config import ModelConfig
from lightning_moe_strategy.models.moe import Experts, MixtureOfExperts, Router

SIGMOID = {"scoring": "sigmoid", "balance_bias": True, "routed_scaling": 2.5}
NUM_TOKENS = 33


def router_and_input(**sizes):
    torch.manual_seed(0)
    router = Router(ModelConfig(hidden=16, **sizes))
    router.weight.data.normal_()
    return router, torch.randn(NUM_TOKENS, 16)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_weights_are_the_scores_of_the_best_experts(scoring, normalize):
    router, x_TD = router_and_input(scoring=scoring, normalize_top_k=normalize, routed_scaling=1.5, top_k=3)
    logits_TE, weights_TK, expert_ids_TK = router(x_TD)
    scores_TE = logits_TE.softmax(-1) if scoring == "softmax" else logits_TE.sigmoid()
    best_TK = scores_TE.topk(3).values
    expected_TK = 1.5 * (best_TK / best_TK.sum(-1, keepdim=True) if normalize else best_TK)
    torch.testing.assert_close(logits_TE, x_TD @ router.weight.T)
    torch.testing.assert_close(scores_TE.gather(1, expert_ids_TK), best_TK)
    torch.testing.assert_close(weights_TK, expected_TK)
    assert expert_ids_TK.dtype == torch.int64


def test_the_balance_bias_moves_the_selection_and_never_the_weights():
    router, x_TD = router_and_input(**SIGMOID, normalize_top_k=False)
    router.balance_bias[5] = 100.0
    logits_TE, weights_TK, expert_ids_TK = router(x_TD)
    assert (expert_ids_TK == 5).any(dim=1).all()
    torch.testing.assert_close(weights_TK, 2.5 * logits_TE.sigmoid().gather(1, expert_ids_TK))
    assert router.balance_bias.dtype == torch.float32
    assert "balance_bias" in router.state_dict()


def test_tokens_pick_only_from_their_best_groups():
    router, x_TD = router_and_input(**SIGMOID, num_groups=4, top_k_groups=2, num_experts=16, top_k=4)
    router.balance_bias.normal_()
    _, _, expert_ids_TK = router(x_TD)
    scores_TGE = (router(x_TD)[0].sigmoid() + router.balance_bias).view(NUM_TOKENS, 4, 4)
    best_groups_TG = scores_TGE.topk(2).values.sum(-1).topk(2).indices
    for token in range(NUM_TOKENS):
        open_experts = [4 * group + i for group in best_groups_TG[token].tolist() for i in range(4)]
        expected = max_k(scores_TGE[token].flatten(), open_experts, 4)
        assert sorted(expert_ids_TK[token].tolist()) == expected


def max_k(scores_E, allowed, k):
    return sorted(sorted(allowed, key=lambda expert: -scores_E[expert].item())[:k])


@pytest.mark.parametrize("precision", ["bf16_module", "bf16_input", "autocast"])
def test_the_router_is_fp32_whatever_is_around_it(precision):
    router, x_TD = router_and_input(**SIGMOID)
    if precision == "bf16_module":
        router.weight.data = router.weight.data.bfloat16()
    x_TD = x_TD.bfloat16()
    expected_logits_TE = x_TD.float() @ router.weight.float().T
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
        logits_TE, weights_TK, _ = router(x_TD)
    assert logits_TE.dtype == weights_TK.dtype == torch.float32
    # A product rounded to bf16 would be off by 4e-3 relative.
    torch.testing.assert_close(logits_TE, expected_logits_TE, rtol=1e-5, atol=1e-6)


def test_the_selection_has_no_gradient_and_the_weights_have():
    router, x_TD = router_and_input(**SIGMOID)
    _, weights_TK, _ = router(x_TD)
    weights_TK[:, 0].sum().backward()
    assert router.weight.grad.abs().sum() > 0


def experts_reference(experts, x_TD, expert_ids_TK, weights_TK):
    """One token and one expert at a time."""
    y_TD = torch.zeros_like(x_TD)
    for token, expert_ids in enumerate(expert_ids_TK.tolist()):
        for k, expert in enumerate(expert_ids):
            gate, up = F.linear(x_TD[token], experts.gate_up_proj[expert]).chunk(2)
            weighted = F.silu(gate) * up * weights_TK[token, k]
            y_TD[token] = y_TD[token] + F.linear(weighted, experts.down_proj[expert])
    return y_TD


@pytest.mark.parametrize("routing", ["random", "one_expert_for_all", "no_token"])
def test_experts_equal_one_token_at_a_time_with_every_gradient(routing):
    torch.manual_seed(0)
    experts = Experts(6, 16, 12)
    num_tokens = 0 if routing == "no_token" else NUM_TOKENS
    x_TD = torch.randn(num_tokens, 16, requires_grad=True)
    weights_TK = torch.rand(num_tokens, 2, requires_grad=True)
    expert_ids_TK = torch.rand(num_tokens, 6)[:, :5].argsort(dim=-1)[:, :2]  # expert 5 is never chosen
    if routing == "one_expert_for_all":
        expert_ids_TK = torch.tensor([[3, 0]]).expand(num_tokens, 2)
    inputs = (x_TD, weights_TK, experts.gate_up_proj, experts.down_proj)
    results = []
    for function in (experts, lambda *args: experts_reference(experts, *args)):
        y_TD = function(x_TD, expert_ids_TK, weights_TK)
        loss = y_TD.square().sum()
        grads = torch.autograd.grad(loss, inputs, materialize_grads=True) if loss.requires_grad else ()
        results.append((y_TD, *grads))
    assert results[0][0].shape == (num_tokens, 16)
    if num_tokens:
        for ours, expected in zip(*results, strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-7)
        assert results[0][3][5].abs().max() == 0


def test_experts_add_up_in_fp32_and_return_the_dtype_they_got():
    torch.manual_seed(0)
    experts = Experts(8, 16, 8)
    x_TD = torch.randn(NUM_TOKENS, 16).bfloat16()
    expert_ids_TK = torch.rand(NUM_TOKENS, 8).argsort(dim=-1)[:, :4]
    weights_TK = torch.rand(NUM_TOKENS, 4)
    y_TD = experts(x_TD, expert_ids_TK, weights_TK)
    assert y_TD.dtype == torch.bfloat16
    expected_TD = experts_reference(experts, x_TD.float(), expert_ids_TK, weights_TK)
    torch.testing.assert_close(y_TD, expected_TD.bfloat16(), rtol=1e-2, atol=0)
    assert experts.bfloat16()(x_TD, expert_ids_TK, weights_TK).dtype == torch.bfloat16


def test_a_layer_is_its_routed_experts_plus_the_shared_ones():
    torch.manual_seed(0)
    layer = MixtureOfExperts(ModelConfig(hidden=16, shared_experts=2, moe_intermediate=12))
    x_BSD = torch.randn(2, 5, 16)
    x_TD = x_BSD.flatten(0, 1)
    _, weights_TK, expert_ids_TK = layer.router(x_TD)
    routed_TD = experts_reference(layer.experts, x_TD, expert_ids_TK, weights_TK)
    assert layer.shared_experts.gate_proj.weight.shape == (24, 16)
    torch.testing.assert_close(layer(x_BSD), routed_TD.view(2, 5, 16) + layer.shared_experts(x_BSD))
