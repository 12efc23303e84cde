"""Random tokens in the forms in which projects keep them."""

import torch
from torch import Tensor
from torch.utils.data import Dataset

VOCABULARY = 61
IGNORED = -100


class NextTokens(Dataset):
    """Pairs (x, y) cut from one stream, y one token ahead."""

    def __init__(self, num_samples: int = 80, length: int = 24, seed: int = 3) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.stream = torch.randint(0, VOCABULARY, (num_samples * length + 1,), generator=generator)
        self.num_samples, self.length = num_samples, length

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.length
        return self.stream[start : start + self.length], self.stream[start + 1 : start + self.length + 1]


class PaddedTexts(Dataset):
    """What a tokenizer with ``padding="max_length"`` returns, labels included."""

    def __init__(self, num_samples: int = 80, max_length: int = 24, shortest: int = 6, seed: int = 4) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.lengths = torch.randint(shortest, max_length + 1, (num_samples,), generator=generator).tolist()
        self.tokens = torch.randint(1, VOCABULARY, (num_samples, max_length), generator=generator).tolist()
        self.max_length = max_length

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        length, padding = self.lengths[index], self.max_length - self.lengths[index]
        tokens = self.tokens[index][:length]
        return {
            "input_ids": tokens + [0] * padding,
            "attention_mask": [1] * length + [0] * padding,
            "labels": tokens + [IGNORED] * padding,
        }
