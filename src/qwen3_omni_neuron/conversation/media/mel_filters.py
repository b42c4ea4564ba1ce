"""Mel filters of a feature extractor."""

import numpy as np
from numpy.typing import NDArray

MAX_HZ = 8000.0  # WhisperFeatureExtractor sets it, for every sampling rate
# The Slaney scale: 3 mels for 200 Hz up to 1000 Hz, above it 27 mels for a factor of 6.4.
_KNEE_HZ, _KNEE_MELS = 1000.0, 15.0
_LOG_STEP = np.log(6.4) / 27.0


def mel_filters(bins: int, mel_bins: int, rate: int) -> NDArray[np.float64]:
    """Compute triangular filters of equal area, float64 [mel_bins, bins].

    bins: frequencies of the transform, from 0 to rate / 2.
    Source: transformers audio_utils.mel_filter_bank, with the norm and the scale of Slaney.
    """
    top_mels = _KNEE_MELS + np.log(MAX_HZ / _KNEE_HZ) / _LOG_STEP
    corners = _hertz(np.linspace(0.0, top_mels, mel_bins + 2))
    frequencies = np.linspace(0, rate // 2, bins)
    widths = np.diff(corners)[:, None]
    distances = corners[:, None] - frequencies  # [mel_bins + 2, bins]
    rising, falling = -distances[:-2] / widths[:-1], distances[2:] / widths[1:]
    heights = 2.0 / (corners[2:] - corners[:-2])
    return np.maximum(0.0, np.minimum(rising, falling)) * heights[:, None]


def _hertz(mels: NDArray[np.float64]) -> NDArray[np.float64]:
    linear = 200.0 * mels / 3.0
    exponential = _KNEE_HZ * np.exp(_LOG_STEP * (mels - _KNEE_MELS))
    return np.where(mels < _KNEE_MELS, linear, exponential)
