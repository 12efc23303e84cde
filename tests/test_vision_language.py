"""Models that read images: the language part has experts and is split over cp, the vision tower runs whole.

Images stand across the borders of chunks, and a batch holds two of each sample.
"""

from functools import partial
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_moe_strategy import FSDPCPEPStrategy, ZigZagContextParallel, verify
from lightning_moe_strategy.context_parallel.batch import find_sequences, split_items
from lightning_moe_strategy.context_parallel.hugging_face_language_part import split_inputs
from tests.families import FAMILIES
from tests.modules import IGNORED, HuggingFaceLanguageModel, PlainLanguageModel, tiny_hf_config
from tests.parity import QUIET
from tests.test_projects import (
    CP2_EP2,
    EP4,
    FSDP4,
    assert_same_ten_steps,
    error_of,
    on_rank,
    one_process,
    share_of_batch,
)

CP4_EP4 = dict(fsdp=1, cp=4, e_fsdp=1, ep=4)
IMAGE, START, END, VIDEO = 51, 52, 53, 54
LENGTH = 26
"""Neither 2 * cp(2) nor 2 * cp(4) divides it."""

TOWER = dict(hidden_size=16, intermediate_size=24, num_heads=2, patch_size=2, in_channels=3, temporal_patch_size=2,
             spatial_merge_size=2, out_hidden_size=32, depth=2)  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1], "partial_rotary_factor": 1.0}
TOKENS = dict(image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=START, vision_end_token_id=END)


def config_of(kind: str) -> Any:
    """Of a model of four tokens an image."""
    from transformers import AutoConfig

    text_type = {"llava": "mixtral"}.get(kind, f"{kind}_text")
    changes = FAMILIES.get(text_type, {"first_k_dense_replace": 1})
    text = tiny_hf_config(text_type, initializer_range=0.1, **changes).to_dict()
    if kind == "llava":
        vision = dict(model_type="clip_vision_model", hidden_size=16, intermediate_size=24, num_hidden_layers=2,
                      num_attention_heads=2, image_size=8, patch_size=4, projection_dim=16)  # fmt: skip
        return AutoConfig.for_model("llava", text_config=text, vision_config=vision, image_token_index=IMAGE,
                                    image_seq_length=4)  # fmt: skip
    vision: dict[str, Any] = dict(TOWER)
    text["rope_parameters"] = ROPE
    if kind == "qwen3_vl_moe":
        vision |= dict(num_position_embeddings=16, deepstack_visual_indexes=[0])
    if kind == "qwen3_5_moe":
        vision |= dict(num_position_embeddings=16)
    if kind == "glm4v_moe":
        vision |= dict(image_size=8)
    return AutoConfig.for_model(kind, text_config=text, vision_config=vision, **TOKENS)


class Captions(L.LightningDataModule):
    """Two images of four tokens each in every sample, and padding at the end of every second."""

    def __init__(self, batch_size: int, kind: str = "qwen3_vl_moe") -> None:
        super().__init__()
        self.batch_size, self.kind = batch_size, kind

    def train_dataloader(self) -> DataLoader:
        generator = torch.Generator().manual_seed(5)
        samples = []
        for number in range(80):
            ids = torch.randint(0, 50, (LENGTH,), generator=generator)
            for at in (3, 15):
                ids[at : at + 6] = torch.tensor([START, *[IMAGE] * 4, END])
            mask = torch.ones_like(ids)
            mask[LENGTH - 2 * (number % 2) :] = 0
            labels = torch.where((ids < 50) & mask.bool(), ids, IGNORED)
            sample = {"input_ids": ids, "attention_mask": mask, "labels": labels}
            if self.kind == "llava":
                sample["pixel_values"] = torch.randn(2, 3, 8, 8, generator=generator)
            else:
                sample["mm_token_type_ids"] = (ids == IMAGE).long()
                sample["pixel_values"] = torch.randn(32, 24, generator=generator)
                sample["image_grid_thw"] = torch.tensor([[1, 4, 4], [1, 4, 4]])
            samples.append(sample)
        return DataLoader(samples, batch_size=self.batch_size)


def images_of(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Of all samples one after another, as models take them."""
    return {name: batch[name].flatten(0, 1) for name in ("pixel_values", "image_grid_thw") if name in batch}


class VisionLanguage(L.LightningModule):
    def __init__(self, kind: str = "qwen3_vl_moe") -> None:
        super().__init__()
        from transformers import AutoModelForImageTextToText

        self.model = AutoModelForImageTextToText.from_config(config_of(kind))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.model(**batch | images_of(batch)).loss
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits: Tensor = self.model(**batch | images_of(batch) | {"labels": None}).logits
        return logits


KINDS = ("qwen3_vl_moe", "glm4v_moe", "qwen3_5_moe", "llava")
FAST = {("qwen3_vl_moe", "cp4-ep4"), ("llava", "cp2-ep2")}


@pytest.mark.parametrize(
    ("kind", "degrees"),
    [
        pytest.param(kind, degrees, id=f"{kind}-{name}", marks=() if (kind, name) in FAST else pytest.mark.slow)
        for kind in KINDS
        for name, degrees in {"cp2-ep2": CP2_EP2, "cp4-ep4": CP4_EP4}.items()
    ],
)
def test_outputs_and_every_gradient_equal_one_process(kind, degrees):
    """The tower's gradients too, of which a rank without a token of any image has none."""
    torch.manual_seed(0)
    result = verify(VisionLanguage(kind), Captions(share_of_batch(degrees), kind), degrees)
    assert result.passed, result.text
    assert max(row.difference for row in result.rows) < 1e-4
    towers = [row for row in result.rows if row.kind == "gradient" and ("visual" in row.name or "tower" in row.name)]
    assert len(towers) > 10


@pytest.mark.slow
@pytest.mark.parametrize("degrees", [CP2_EP2, EP4, FSDP4], ids=["cp2-ep2", "ep4", "fsdp4"])
def test_ten_steps_are_those_of_one_process(degrees, ranks4):
    _, module, losses = one_process(VisionLanguage, Captions)
    assert_same_ten_steps(ranks4(on_rank, degrees, VisionLanguage, Captions), module, losses)


def predicted() -> Tensor:
    torch.manual_seed(0)
    module, zigzag = VisionLanguage(), ZigZagContextParallel()
    strategy = FSDPCPEPStrategy(fsdp=1, cp=2, e_fsdp=1, ep=2)
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, callbacks=[zigzag], limit_predict_batches=1, **QUIET
    )
    (logits,) = trainer.predict(module, Captions(2).train_dataloader())
    return zigzag.restore(logits)


def test_predictions_of_a_part_can_be_restored(ranks2):
    torch.manual_seed(0)
    module = VisionLanguage().eval()
    batch = next(iter(Captions(2).train_dataloader()))
    with torch.no_grad():
        expected = module.predict_step(batch, 0)
    is_token = batch["attention_mask"].bool()
    for logits in ranks2(predicted):
        torch.testing.assert_close(logits[is_token], expected[is_token], rtol=1e-5, atol=1e-5)


class OwnLoss(VisionLanguage):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits = self.predict_step(batch, batch_idx)
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


class BesideAnother(VisionLanguage):
    def __init__(self) -> None:
        super().__init__()
        self.judge = HuggingFaceLanguageModel().model


class BesideBlocks(VisionLanguage):
    def __init__(self) -> None:
        super().__init__()
        self.judge = PlainLanguageModel().decoder


@pytest.mark.parametrize(
    ("make", "zigzag", "sentence"),
    [
        (OwnLoss, dict(shift="module"), "Pass labels= to the model"),
        (VisionLanguage, dict(verify_cp=True), "Say verify_cp=False, and run lightning-moe verify"),
        (BesideAnother, {}, "judge read parts of a batch"),
        (BesideBlocks, {}, "judge.blocks.0 (Block) stands beside a model that reads images"),
    ],
)  # fmt: skip
def test_what_needs_parts_of_the_batch_is_refused(make, zigzag, sentence, ranks4):
    for message in ranks4(partial(error_of, on_rank, zigzag=zigzag), CP2_EP2, make, Captions):
        assert sentence in message, message


def test_a_language_part_is_given_its_own_tokens_of_everything():
    """Positions of three axes, features of images by the rank's own tokens of images, and nothing that is whole."""
    ids_BS = torch.arange(2 * LENGTH).view(2, LENGTH)
    _, sequence, _ = split_items(
        {"input_ids": ids_BS}, find_sequences({"input_ids": ids_BS}, sequence_keys=None, labels_key=None),
        shift="model", degree=2, rank=1, ignore_index=IGNORED, pad_token_id=0,
    )  # fmt: skip
    is_image_BS = ids_BS % 5 < 2
    features_ND = ids_BS[is_image_BS].float()[:, None].expand(-1, 3)
    other = torch.ones(2, 7)
    given = dict(inputs_embeds=ids_BS[..., None].float(), position_ids=torch.stack([ids_BS, -ids_BS, 2 * ids_BS]),
                 visual_pos_masks=is_image_BS, deepstack_visual_embeds=[features_ND, 2 * features_ND], other=other,
                 attention_mask=torch.ones(2, LENGTH))  # fmt: skip
    split = split_inputs(given, sequence, 1, "Model")
    own_BL = torch.cat([ids_BS[:, 7:14], ids_BS[:, 14:21]], 1)
    assert torch.equal(split["inputs_embeds"][..., 0], own_BL.float()) and split["attention_mask"] is None
    assert torch.equal(split["position_ids"], torch.stack([own_BL, -own_BL, 2 * own_BL])) and split["other"] is other
    for number, features in enumerate(split["deepstack_visual_embeds"], start=1):
        assert torch.equal(features[:, 0], number * own_BL[split["visual_pos_masks"]].float())
    with pytest.raises(ValueError, match="was given 13 tokens, and the batch has 26"):
        split_inputs(given | {"inputs_embeds": given["inputs_embeds"][:, ::2]}, sequence, 1, "Model")
    holes_BS = torch.ones(2, LENGTH)
    holes_BS[0, 3] = 0
    for mask in ({"full_attention": None}, torch.ones(2, 1, LENGTH, LENGTH), holes_BS):
        with pytest.raises(ValueError, match=r"a mask that is not the batch's \((dict|Tensor)\).*Choose cp=1"):
            split_inputs(given | {"attention_mask": mask}, sequence, 1, "Model")
