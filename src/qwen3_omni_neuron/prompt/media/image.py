"""Image of a message item -> an upright RGB image, checked."""

import contextlib
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from qwen3_omni_neuron.errors import ImageError
from qwen3_omni_neuron.prompt.media.fields import (
    Source,
    Warn,
    ignore,
    name_of,
    open_media,
    read_format,
    source_of,
)

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_ASPECT = 200  # longer side / shorter side, as in transformers' smart_resize
_PILLOW = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")  # all other plugins stay unused
Check = Callable[[int, int], object]
"""Function of the height and width of a file's image; may raise."""
_CHANNELS = (1, 3, 4)
_BITS, _PHOTOMETRIC, _SAMPLE_FORMAT = 258, 262, 339  # tags of TIFF
_SHOWING = threading.Lock()  # guards Python's global function that shows warnings


def load_image(
    item: Mapping[str, Any], where: str, check: Check = ignore, warn: Warn = ignore
) -> "Image":
    """Read an image item of a message, in RGB.

    item["image"] is a path, the bytes of an image file, a PIL image, or an array or tensor [height,
    width], [height, width, channels] or [channels, height, width], of uint8 or of floats in [0, 1].
    EXIF orientation is applied, transparency is blended with white, an animation is its first
    frame, 16-bit grey its high byte.
    check: called with a file's height and width before decoding. warn: called for a damaged image.
    Raises ImageError.
    Source: transformers image_utils.load_image, image_transforms.convert_to_rgb (transformers 5).
    """
    from PIL.Image import Image

    source = item.get("image")
    if source is None:
        raise ImageError(f'{where} has no "image": give a path, bytes, a PIL image or an array.')
    said: list[str] = []
    if (file := source_of(source, where, ImageError)) is not None:
        picture = _read_file(file, where, check, said)
    elif isinstance(source, Image):
        picture = _from_pil(source, where, said)
    else:
        picture = _from_array(source, where)
    if said:
        name = "the PIL image" if file is None else name_of(file)
        warn(f"{where}: {name} is damaged: {'; '.join(dict.fromkeys(said))}. It is used anyway.")
    return _checked(picture, where)


def _read_file(source: Source, where: str, check: Check, said: list[str]) -> "Image":
    from PIL import Image

    read_format(source, where, "image")
    name = name_of(source)
    with open_media(source, where, ImageError) as file:
        with _image_errors(where, name), _noted(said):
            opened = Image.open(file, formats=_PILLOW)
        with opened as picture:
            check(picture.height, picture.width)
            with _image_errors(where, name), _noted(said):
                return _upright_rgb(picture, f"{where}: {name}")


@contextlib.contextmanager
def _noted(said: list[str]) -> Iterator[None]:
    """Append Pillow's warnings to `said` instead of printing them."""
    with _SHOWING, warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always", UserWarning)
        yield
    for warning in noted:
        if issubclass(warning.category, UserWarning):
            said.append(str(warning.message).strip().rstrip("."))
        else:
            warnings.warn(warning.message, stacklevel=2)


@contextlib.contextmanager
def _image_errors(where: str, name: str) -> Iterator[None]:
    from PIL import Image, UnidentifiedImageError

    try:
        yield
    except ImageError:
        raise
    # The warning is raised if Python turns warnings into errors.
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ImageError(f"{where}: {name} is too large: {error} Shrink it.") from error
    except Exception as error:  # the decoders' exceptions have no common class
        # The message of UnidentifiedImageError has the address of an object.
        why = "" if isinstance(error, UnidentifiedImageError) else f" ({error})"
        raise ImageError(
            f"{where}: {name} is a damaged or truncated image{why}. Save it again."
        ) from error


def _from_pil(source: "Image", where: str, said: list[str]) -> "Image":
    try:
        with _noted(said):
            return _upright_rgb(source, f"{where}: the PIL image")
    except ImageError:
        raise
    except Exception as error:  # PIL reads lazily: its file may be broken or closed
        raise ImageError(f"{where} is a PIL image that can't be read ({error}).") from error


def _upright_rgb(picture: "Image", place: str) -> "Image":
    from PIL import Image, ImageOps

    kind, tags, transparent = picture.format, getattr(picture, "tag_v2", {}), _transparent(picture)
    picture.load()
    with contextlib.suppress(Exception):
        picture = ImageOps.exif_transpose(picture)
    if picture.mode[0] in "IF":
        values = np.asarray(picture)
        picture = Image.fromarray(_narrowed(values, tags, place))
        if transparent is not None:
            picture.putalpha(Image.fromarray(np.where(values == transparent, 0, 255).astype("u1")))
    elif transparent != picture.info.get("transparency"):
        picture = picture.copy()
        picture.info["transparency"] = transparent
    if picture.mode in ("La", "RGBa"):
        picture = picture.convert(picture.mode.upper())  # undo premultiplied alpha
    # Writers of BMP leave the alpha bytes at 0.
    if kind == "BMP" and picture.mode == "RGBA" and not picture.getchannel("A").getbbox():
        picture = picture.convert("RGB")
    in_palette = picture.mode == "P" and picture.palette and picture.palette.mode == "RGBA"
    if "A" in picture.getbands() or in_palette or picture.info.get("transparency") is not None:
        picture = picture.convert("RGBA")
        white = Image.new("RGBA", picture.size, "white")
        picture = Image.alpha_composite(white, picture)
    return picture.convert("RGB")


def _transparent(picture: "Image") -> Any:
    """Return a picture's transparent value, on Pillow's scale of a PNG's pixels."""
    value, tiles = picture.info.get("transparency"), getattr(picture, "tile", None)
    stored = tiles[0][3] if tiles and picture.format == "PNG" else None
    if value is None or stored not in ("L;2", "L;4", "RGB;16B"):
        return value
    return (
        {"L;2": 85, "L;4": 17}[stored] * value if stored[0] == "L" else tuple(v >> 8 for v in value)
    )


def _narrowed(values: NDArray[Any], tags: Mapping[int, Any], place: str) -> NDArray[np.uint8]:
    """Convert grey of 16 or 32 bits, or of floats up to 1 or 255, to bytes. tags: of a TIFF.

    32-bit values up to 255 count as 8 bits, up to 65535 as 16.
    """
    if values.dtype == np.int32 and tags.get(_SAMPLE_FORMAT) == (1,):
        values = values.view(np.uint32)
    low, high = (float(values.min()), float(values.max())) if values.size else (0.0, 0.0)
    floats = values.dtype.kind == "f"
    if not (low >= 0 and (high <= 255 or not floats)):
        raise ImageError(
            f"{place} has grey values from {low:g} to {high:g}, an unknown range. Save it with "
            "8 or 16 bits."
        )
    if floats:
        return np.round(values * 255 if high <= 1 else values).astype(np.uint8)
    if values.dtype.itemsize == 2:
        (bits,) = tags.get(_BITS, (16,))
        values = (1 << bits) - 1 - values if tags.get(_PHOTOMETRIC) == 0 else values
    elif high > 65535:
        bits = np.iinfo(values.dtype).bits - (values.dtype.kind == "i")
    else:
        bits = 8 if high <= 255 else 15 if tags.get(_BITS) == (16,) else 16
    return (values >> (bits - 8)).astype(np.uint8)


def _from_array(source: Any, where: str) -> "Image":
    from PIL import Image

    try:
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(source, torch.Tensor):
            source = source.detach().cpu()
            source = source.float() if source.is_floating_point() else source
        values = np.asarray(source)
    except Exception as error:
        raise ImageError(
            f"{where} is neither a path, bytes, a PIL image nor an array: {error}. Give one of "
            "these."
        ) from error
    pixels = _bytes_of(_channels_last(values, where), where)
    grey = pixels.shape[-1] == 1
    return _upright_rgb(Image.fromarray(pixels[..., 0] if grey else pixels), where)


def _channels_last(values: NDArray[Any], where: str) -> NDArray[Any]:
    shape = list(values.shape)
    if values.ndim > 0 and values.size == 0:
        raise ImageError(f"{where} is an array of shape {shape}, which has no pixels.")
    if values.ndim == 2:
        return values[..., None]
    if values.ndim == 3 and shape[-1] in _CHANNELS:
        return values
    if values.ndim == 3 and shape[0] in _CHANNELS:
        return np.moveaxis(values, 0, -1)
    raise ImageError(
        f"{where} is an array of {values.dtype} of shape {shape}; give [height, width], "
        "[height, width, channels] or [channels, height, width], with 1, 3 or 4 channels."
    )


def _bytes_of(values: NDArray[Any], where: str) -> NDArray[np.uint8]:
    if values.dtype == np.uint8:
        return np.ascontiguousarray(values)
    if not np.issubdtype(values.dtype, np.floating):
        raise ImageError(
            f"{where} is an array of {values.dtype}; give uint8 (0 to 255) or floats (0 to 1)."
        )
    low, high = float(values.min()), float(values.max())
    if not (low >= 0 and high <= 1):
        raise ImageError(
            f"{where} is an array of floats from {low:g} to {high:g}; they must be from 0 to 1. "
            "Divide by 255, or give uint8."
        )
    return np.ascontiguousarray(np.round(values * 255), dtype=np.uint8)


def _checked(picture: "Image", where: str) -> "Image":
    width, height = picture.size
    if not width or not height:
        raise ImageError(f"{where} is {width} x {height} pixels: it is empty.")
    aspect = max(width, height) / min(width, height)
    if aspect > MAX_ASPECT:
        raise ImageError(
            f"{where} is {width} x {height} pixels: one side is {aspect:.1f} times the other; "
            f"the limit is {MAX_ASPECT} times. Crop it."
        )
    return picture
