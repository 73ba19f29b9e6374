"""Pictures from files: upright, RGB, transparency flattened."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps


def opened(source: str | Path | bytes) -> Image.Image:
    """Return the picture in a file, given by its path or its bytes, converted by `upright_rgb`.

    Raises OSError where there is no such file, ValueError where it holds no readable picture.
    """
    data = source if isinstance(source, bytes) else Path(source).expanduser().read_bytes()
    try:
        with Image.open(io.BytesIO(data)) as image:
            image.load()
            return upright_rgb(image)
    except Exception as error:  # on damaged data Pillow's decoders raise anything, OSError to struct.error
        raise ValueError("no readable image") from error


def upright_rgb(image: Image.Image) -> Image.Image:
    """Return the first frame as RGB, turned as its EXIF data says, transparency flattened on white.

    Nothing else of its file is kept, whose profiles and texts may be megabytes. The image itself may be turned.
    """
    with contextlib.suppress(Exception):  # a picture with damaged EXIF data is still a picture
        ImageOps.exif_transpose(image, in_place=True)  # otherwise it copies each image
    if image.mode.startswith("I;16"):  # Pillow would clip 16-bit grey to 255 instead of scaling it
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    rgb = image.convert("RGB")  # a copy
    rgb.info.clear()
    return rgb
