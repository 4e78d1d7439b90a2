"""Rotary position embedding: frequencies, the table of a worker, and the rotation.

Owns the half-split form that Hugging Face uses (element i turns with element i + rotary_dim / 2;
what lies beyond rotary_dim stays as it is).
The table is made once at load from the config and the worker's maximum context and never changes:
KV written by one worker is only readable by another because both have the same table.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from baton.engine.config import ModelConfig
from baton.engine.rope_scaling import RopeKind, RopeScaling


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeTable:
    """Cosines and sines, float32 [max_context, rotary_dim]; the two halves repeat each other.

    The first half of `sine` is negated, so that a rotation is x * cosine + swapped(x) * sine.
    """

    cosine: torch.Tensor
    sine: torch.Tensor

    def to(self, device: torch.device) -> RopeTable:
        """The same table in a device's memory."""
        return RopeTable(cosine=self.cosine.to(device), sine=self.sine.to(device))


def inverse_frequencies(config: ModelConfig) -> torch.Tensor:
    """The turn per position of each pair, float32 [rotary_dim / 2], scaling applied."""
    exponents = torch.arange(0, config.rotary_dim, 2, dtype=torch.int64).float() / config.rotary_dim
    plain = 1.0 / (config.rope_theta**exponents)
    scaling = config.rope_scaling
    if scaling is None:
        return plain
    if scaling.kind is RopeKind.LINEAR:
        return plain / scaling.factor
    if scaling.kind is RopeKind.FACTORS:
        return plain / torch.tensor(scaling.factors, dtype=torch.float32)
    return _llama3(plain, scaling)


def _llama3(plain: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Slow turns are divided by the factor, fast ones kept, those between blended."""
    wavelength = 2 * math.pi / plain
    low_wavelength = scaling.original_max_context / scaling.low_freq_factor
    high_wavelength = scaling.original_max_context / scaling.high_freq_factor
    slowed = torch.where(wavelength > low_wavelength, plain / scaling.factor, plain)
    share = (scaling.original_max_context / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended = (1 - share) * slowed / scaling.factor + share * slowed
    is_between = ~(wavelength < high_wavelength) & ~(wavelength > low_wavelength)
    return torch.where(is_between, blended, slowed)


def build_table(config: ModelConfig, max_context: int) -> RopeTable:
    """The table for positions 0 to max_context - 1."""
    positions = torch.arange(max_context, dtype=torch.int64).float()
    angles = torch.outer(positions, inverse_frequencies(config))
    scaling = config.rope_scaling
    factor = 1.0 if scaling is None else scaling.attention_factor
    cosine, sine = angles.cos() * factor, angles.sin() * factor
    return RopeTable(
        cosine=torch.cat((cosine, cosine), dim=-1), sine=torch.cat((-sine, sine), dim=-1)
    )


def rotate(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Turn `x` [tokens, heads, head_dim] by rows of the table [tokens, 1, rotary_dim].

    The result is float32: rounding to the KV type happens once, at the end.
    """
    width = cosine.shape[-1]
    turned, rest = x[..., :width], x[..., width:]
    swapped = torch.roll(turned, width // 2, dims=-1)
    rotated = turned * cosine + swapped * sine
    return rotated if rest.shape[-1] == 0 else torch.cat((rotated, rest), dim=-1)
