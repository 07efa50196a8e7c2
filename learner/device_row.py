"""A packed row on the device: its tensors and how its attention is computed, ready before the row before it is done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from learner.attention import RowAttention, row_attention
from learner.packing import PackedRow


@dataclass(frozen=True, slots=True)
class DeviceRow:
    """The fields of `PackedRow` as tensors, [n] or [m]."""

    token_ids: Tensor
    position_ids: Tensor
    predictor: Tensor
    target: Tensor
    behaviour: Tensor
    advantage: Tensor
    weight: Tensor
    staleness: Tensor
    sequence: Tensor
    """Numbered from 0 within the row."""
    attention: RowAttention | BlockMask

    @classmethod
    def of(cls, row: PackedRow, device: torch.device, dtype: torch.dtype) -> DeviceRow:
        """Bring `row` to `device`; `dtype` is that of attention's queries."""

        def tensor(array: npt.NDArray[Any]) -> Tensor:
            return torch.from_numpy(array).to(device, non_blocking=True)

        return cls(
            token_ids=tensor(row.token_ids),
            position_ids=tensor(row.position_ids),
            predictor=tensor(row.predictor),
            target=tensor(row.target),
            behaviour=tensor(row.behaviour),
            advantage=tensor(row.advantage),
            weight=tensor(row.weight),
            staleness=tensor(row.staleness),
            sequence=tensor(np.unique(row.sequence, return_inverse=True)[1]),
            attention=row_attention(row, device, dtype),
        )
