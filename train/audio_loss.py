"""Loss between two waveforms: of samples, and of spectra of several window lengths."""

import torch
from torch import Tensor

WINDOWS = (256, 512, 1024, 2048)
_FLOOR = 0.01  # magnitudes below it count as silence


def audio_losses(made: Tensor, wanted: Tensor) -> dict[str, Tensor]:
    """Return the losses by name. made, wanted: float32 [B, samples]."""
    spectral = [_spectral(made, wanted, window) for window in WINDOWS]
    return {
        "samples": 10 * (made - wanted).abs().mean(),
        "convergence": torch.stack([c for c, _ in spectral]).mean(),
        "magnitude": torch.stack([m for _, m in spectral]).mean(),
    }


def _spectral(made: Tensor, wanted: Tensor, window: int) -> tuple[Tensor, Tensor]:
    a, b = _magnitudes(made, window), _magnitudes(wanted, window)
    convergence = torch.linalg.vector_norm(a - b) / torch.linalg.vector_norm(b)
    return convergence, (torch.log(a + _FLOOR) - torch.log(b + _FLOOR)).abs().mean()


def _magnitudes(samples: Tensor, window: int) -> Tensor:
    shape = torch.hann_window(window, device=samples.device)
    spectrum = torch.stft(samples, window, window // 4, window=shape, return_complex=True)
    return spectrum.abs().clamp_min(1e-5)
