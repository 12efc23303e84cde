"""Language models for ``Trainer.fit``: this package's transformer, or any Hugging Face causal LM.

They hold nothing parallel: the same class trains in one process and on a thousand GPUs. A batch is a dict of

- ``input_ids`` [B, S] int64;
- ``shift_labels`` [B, S]: the target of each token, -100 where none counts; or ``labels`` [B, S], aligned
  with the inputs as Hugging Face has them (they are shifted here). With both, ``shift_labels`` is used:
  targets that were shifted before a sequence was cut stay right in every piece;
- ``position_ids`` [B, S], optional: where the tokens stand in their sequence.

Shapes: B batch, S sequence (of this process), V vocabulary.
"""

import dataclasses
import json
import math
from abc import abstractmethod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_moe_strategy._lightning_compat import LightningModule
from lightning_moe_strategy.hugging_face_weights.pretrained import load_pretrained
from lightning_moe_strategy.models.config import ModelConfig
from lightning_moe_strategy.models.loss import IGNORE_INDEX, cross_entropy_sum, shift_labels
from lightning_moe_strategy.models.transformer import MoETransformer

Batch = dict[str, Tensor]


class CausalLanguageModel(LightningModule):
    """Training, evaluation and prediction of next tokens; a subclass sets ``self.model`` and says its loss.

    Logs ``train_loss``, ``val_loss``, ``val_perplexity``, ``test_loss``: means in nats over the tokens that
    count, of all ranks and of the whole epoch. AdamW without decay on norms, linear warm-up, then a cosine
    down to ``final_learning_rate_ratio``.
    """

    model: nn.Module

    def __init__(
        self,
        *,
        learning_rate: float = 3e-4,
        weight_decay: float = 0.1,
        warmup_steps: int = 100,
        final_learning_rate_ratio: float = 0.1,
    ) -> None:
        super().__init__()
        _require("learning_rate", learning_rate, learning_rate > 0, "above 0")
        _require("weight_decay", weight_decay, weight_decay >= 0, "at least 0")
        _require("warmup_steps", warmup_steps, warmup_steps >= 0, "at least 0")
        ratio_holds = 0 <= final_learning_rate_ratio <= 1
        _require("final_learning_rate_ratio", final_learning_rate_ratio, ratio_holds, "between 0 and 1")
        self.learning_rate, self.weight_decay = learning_rate, weight_decay
        self.warmup_steps, self.final_learning_rate_ratio = warmup_steps, final_learning_rate_ratio
        # Metrics hold real numbers even while the model around them is built on the meta device.
        with torch.device("cpu"):
            self.train_loss, self.val_loss, self.test_loss = TokenMean(), TokenMean(), TokenMean()
            self.val_perplexity = TokenPerplexity()

    @abstractmethod
    def loss_and_count(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Mean loss (nats) over the tokens of ``batch`` that count, zero if none does, and how many they are."""

    @abstractmethod
    def logits(self, batch: Batch) -> Tensor:
        """logits_BSV of the tokens that follow each of ``batch``."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss, num_tokens = self.loss_and_count(batch)
        self._log_train_loss(loss, num_tokens)
        return loss

    def _log_train_loss(self, loss: Tensor, num_tokens: Tensor) -> None:
        self.train_loss(loss.detach(), weight=num_tokens)
        self.log("train_loss", self.train_loss, prog_bar=True, on_step=True, on_epoch=True)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        loss, num_tokens = self.loss_and_count(batch)
        self.val_loss.update(loss, weight=num_tokens)
        self.val_perplexity.update(loss, weight=num_tokens)
        self.log("val_loss", self.val_loss, prog_bar=True)
        self.log("val_perplexity", self.val_perplexity)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        loss, num_tokens = self.loss_and_count(batch)
        self.test_loss.update(loss, weight=num_tokens)
        self.log("test_loss", self.test_loss, prog_bar=True)

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The most likely next token of every token, [B, S]: logits of a whole dataset would fit nowhere."""
        return self.logits(batch).argmax(dim=-1)

    def configure_optimizers(self) -> Any:
        parameters = [parameter for parameter in self.parameters() if parameter.requires_grad]
        groups = [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": self.weight_decay},
            {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
        ]
        used = [group for group in groups if group["params"]]
        optimizer = torch.optim.AdamW(used, lr=self.learning_rate, betas=(0.9, 0.95))
        total_steps = self.trainer.estimated_stepping_batches

        def factor(step: int) -> float:
            return warmup_cosine(step, self.warmup_steps, total_steps, self.final_learning_rate_ratio)

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class MoELanguageModel(CausalLanguageModel):
    """The package's own mixture-of-experts transformer.

    With ``mtp_layers`` it trains multi-token prediction too and logs ``train_mtp_loss``: nats per
    token of the main loss, the mean of all depths, which enters the loss times ``mtp_loss``. Every other loss that is
    logged is the main one.

    Args:
        model: a preset's name (``glm-5.2``, ``tiny``, ...), a dict of sizes (``preset`` names its base), or a
            ``ModelConfig``.
        learning_rate: the largest, at the end of the warm-up.
        weight_decay: of everything but vectors.
        warmup_steps: optimizer steps of linear warm-up.
        final_learning_rate_ratio: the last learning rate over the largest, 0 to 1; a cosine leads there.

    Raises:
        ValueError: a preset or size that is not known, or a number out of range.
    """

    def __init__(
        self,
        model: ModelConfig | dict[str, Any] | str = "tiny",
        *,
        learning_rate: float = 3e-4,
        weight_decay: float = 0.1,
        warmup_steps: int = 100,
        final_learning_rate_ratio: float = 0.1,
    ) -> None:
        super().__init__(
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            warmup_steps=warmup_steps,
            final_learning_rate_ratio=final_learning_rate_ratio,
        )
        self.config = ModelConfig.resolve(model)
        self.save_hyperparameters(ignore=["model"])
        # Plain values: a checkpoint must load with torch.load(weights_only=True).
        self.save_hyperparameters({"model": dataclasses.asdict(self.config)})
        self.model = MoETransformer(self.config)
        if self.config.mtp_layers:
            with torch.device("cpu"):
                self.train_mtp_loss = TokenMean()

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        if not self.config.mtp_layers:
            return super().training_step(batch, batch_idx)
        targets_BS = _targets(batch)
        num_tokens = (targets_BS != IGNORE_INDEX).sum()
        # One divisor for all: the strategy turns a mean over the main loss's tokens into a sum.
        divisor = num_tokens.clamp(min=1)
        logits_BSV, losses_M = self.model(batch["input_ids"], batch.get("position_ids"), targets_BS)
        loss = cross_entropy_sum(logits_BSV.flatten(0, 1), targets_BS.flatten()) / divisor
        mtp_loss = losses_M.mean() / divisor
        self._log_train_loss(loss, num_tokens)
        self.train_mtp_loss(mtp_loss.detach(), weight=num_tokens)
        self.log("train_mtp_loss", self.train_mtp_loss, on_step=True, on_epoch=True)
        total: Tensor = loss + self.config.mtp_loss * mtp_loss
        return total

    def loss_and_count(self, batch: Batch) -> tuple[Tensor, Tensor]:
        targets_BS = _targets(batch)
        num_tokens = (targets_BS != IGNORE_INDEX).sum()
        loss = cross_entropy_sum(self.logits(batch).flatten(0, 1), targets_BS.flatten())
        return loss / num_tokens.clamp(min=1), num_tokens

    def logits(self, batch: Batch) -> Tensor:
        # No attention_mask: padding stands at the end, where causal attention never looks from a token.
        logits_BSV: Tensor = self.model(batch["input_ids"], batch.get("position_ids"))
        return logits_BSV


class HFCausalLM(CausalLanguageModel):
    """Any Hugging Face causal language model, with random weights or those of a folder.

    Under the command line, no rank ever holds or reads more than its part of the weights.

    Args:
        config: the path of a ``config.json`` (or its folder), or a dict with ``model_type`` and the sizes to change,
            for example ``{"model_type": "qwen3_moe", "hidden_size": 128}``.
        pretrained: a folder with safetensors; it gives the configuration too, unless there is a ``config``.
        learning_rate: the largest, at the end of the warm-up.
        weight_decay: of everything but vectors.
        warmup_steps: optimizer steps of linear warm-up.
        final_learning_rate_ratio: the last learning rate over the largest, 0 to 1; a cosine leads there.

    Raises:
        ValueError: neither of the first two, a path that is not here, no ``model_type``, or a number out of range.
        CheckpointError: weights that are not the model's.
    """

    def __init__(
        self,
        config: dict[str, Any] | str | None = None,
        *,
        pretrained: str | None = None,
        learning_rate: float = 3e-4,
        weight_decay: float = 0.1,
        warmup_steps: int = 100,
        final_learning_rate_ratio: float = 0.1,
    ) -> None:
        super().__init__(
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            warmup_steps=warmup_steps,
            final_learning_rate_ratio=final_learning_rate_ratio,
        )
        hf_config = _read_hugging_face(config, pretrained)
        self.save_hyperparameters(ignore=["config", "pretrained"])
        # All of it: a checkpoint stays whole when the folder is gone, and is not filled from it again.
        self.save_hyperparameters({"config": json.loads(hf_config.to_json_string(use_diff=False))})
        self.model = _build_hugging_face(hf_config)
        if pretrained is not None:
            load_pretrained(self.model, pretrained)

    def loss_and_count(self, batch: Batch) -> tuple[Tensor, Tensor]:
        if "shift_labels" not in batch:
            loss: Tensor = self.model(**_inputs(batch), labels=batch["labels"]).loss
            return loss, (batch["labels"][:, 1:] != IGNORE_INDEX).sum()
        targets_BS = batch["shift_labels"].contiguous()  # transformers takes a view of it
        num_tokens = (targets_BS != IGNORE_INDEX).sum()
        # The model divides by num_items_in_batch, so a batch without a single target gives zero and not 0/0.
        divisor = num_tokens.clamp(min=1)
        output = self.model(**_inputs(batch), labels=targets_BS, shift_labels=targets_BS, num_items_in_batch=divisor)
        return output.loss, num_tokens

    def logits(self, batch: Batch) -> Tensor:
        logits_BSV: Tensor = self.model(**_inputs(batch)).logits
        return logits_BSV


class TokenMean(MeanMetric):
    """Mean weighted by tokens. FP64: an epoch of 1e9 tokens added up in FP32 loses the third digit."""

    def __init__(self) -> None:
        super().__init__()
        self.set_dtype(torch.float64)


class TokenPerplexity(TokenMean):
    """exp of the mean loss per token."""

    def compute(self) -> Tensor:
        return super().compute().exp()


def warmup_cosine(step: int, warmup_steps: int, total_steps: float, final_ratio: float) -> float:
    """Share of the peak learning rate at ``step`` (0-based); 1 after the warm-up when no end is known."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if math.isinf(total_steps):
        return 1.0
    progress = min(1.0, (step - warmup_steps) / max(1.0, total_steps - warmup_steps))
    return final_ratio + (1.0 - final_ratio) * 0.5 * (1.0 + math.cos(math.pi * progress))


def _targets(batch: Batch) -> Tensor:
    return batch["shift_labels"] if "shift_labels" in batch else shift_labels(batch["labels"])


def _inputs(batch: Batch) -> dict[str, Any]:
    names = ("input_ids", "position_ids", "attention_mask")
    return {name: batch[name] for name in names if name in batch} | {"use_cache": False}


def _read_hugging_face(config: dict[str, Any] | str | None, pretrained: str | None) -> Any:
    try:
        from transformers import AutoConfig
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("HFCausalLM needs transformers: pip install 'lightning-moe-strategy[hf]'.") from error
    if config is None and pretrained is None:
        raise ValueError("HFCausalLM needs a config or a folder with pretrained weights. Give one of the two.")
    if pretrained is not None and not Path(pretrained).is_dir():
        raise ValueError(
            f"pretrained({pretrained!r}) is no folder here, and nothing is downloaded. Fetch the model first: "
            f"hf download {pretrained} --local-dir DIR"
        )
    if config is None:
        return AutoConfig.from_pretrained(pretrained)
    if isinstance(config, str):
        if not Path(config).exists():
            raise ValueError(f"config({config!r}) does not exist. Give the path of a config.json or its folder.")
        return AutoConfig.from_pretrained(config)
    if "model_type" not in config:
        raise ValueError(f"config has keys {sorted(config)} but no model_type. Add one, for example qwen3_moe.")
    return AutoConfig.for_model(**config)


def _build_hugging_face(config: Any) -> nn.Module:
    from transformers import AutoModelForCausalLM

    model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model


def _require(name: str, value: float, holds: bool, rule: str) -> None:
    if not holds:
        raise ValueError(f"{name}({value}) must be {rule}.")
