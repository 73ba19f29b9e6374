"""Images of a request: from a data: URI (or, if switched on, a public URL) to an upright RGB image.

Every bound is checked before the memory is spent: the encoded bytes before base64 decoding, the size and shape in the header
before the pixels are decoded, and the number of the file's parts while they are read.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import math
import re
from collections.abc import Callable, Iterable
from itertools import islice

from PIL import Image

from server.errors import BadRequest
from server.images.base64_forms import plain_base64
from server.images.container import Reads, TooComplex, check, ends_early
from server.images.decoded import DecodedPictures
from server.settings import Settings
from steering.pictures import upright_rgb
from steering.protocol.wording import cut

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "AVIF")
MAX_SIDE = 65_535
"""Longest side in pixels, since Pillow keeps a pointer and libraries a buffer for each row."""
MAX_RATIO = 200
"""Largest ratio of the longer side to the shorter one, as in Qwen-VL's processors.

Other processors scale the shorter side to a fixed size, and would make gigabytes of a line of pixels.
"""
LARGE = 4_000_000
"""Pixels of images, together, whose decoding takes more than a tenth of a second."""
BEGINNING = 256 * 2**10
MOST_READS = 1000
"""Bytes of a file, and reads from it, for its number of pixels, which is looked up before a request waits for its turn."""
_DATA_URI = re.compile(r"data:(?P<type>[\w.+-]+/[\w.+-]+)?(?:;[\w.+-]+=[\w.+-]+)*;base64,", re.IGNORECASE | re.ASCII)


class ImageLoader:
    """Loads the images of one request and counts them and their pixels.

    `fetch` gets (url, param) of a remote image and returns its bytes; None if remote images are off. `decoded` is shared
    with other requests' loaders, `fetched` with another loader of the same request.
    """

    def __init__(
        self,
        settings: Settings,
        fetch: Callable[[str, str], bytes] | None = None,
        decoded: DecodedPictures | None = None,
        fetched: dict[str, bytes] | None = None,
    ):
        self.settings = settings
        self.fetch = fetch
        self.decoded = decoded or DecodedPictures(0)
        self.count = 0
        self.pixels = 0
        self.check: Callable[[], object] = lambda: None
        """Called before each image; raises once nobody waits for them any more."""
        self._fetched: dict[str, bytes] = {} if fetched is None else fetched

    def fetch_remote(self, urls: Iterable[tuple[str, str]]) -> None:
        """Fetch the remote images among (url, param), if switched on, so that `load` only decodes.

        Raises BadRequest, before any is fetched, if these are too many.
        """
        sent = list(urls)
        self.check_number(len(sent))
        for url, param in sent:
            if self.fetch is not None and is_remote(url) and url not in self._fetched:
                self._fetched[url] = self.fetch(url, param)

    def are_large(self, urls: Iterable[tuple[str, str]]) -> bool:
        """Return True where decoding the images among (url, param) takes long, as far as their files' beginnings say."""
        pixels = [(self._pixels(url), url) for url, _ in islice(urls, self.settings.max_images)]
        if sum(count for count, _ in pixels) <= LARGE:  # in most cases, and costs less than looking them up
            return False
        return sum(count for count, url in pixels if not self.decoded.has(url)) > LARGE

    def _pixels(self, url: str) -> float:
        """Return an image's pixels; infinity where the beginning of its file does not say."""
        try:
            if (file := self._fetched.get(url)) is None:
                encoded = plain_base64(url[: 2 * BEGINNING].partition(",")[2])
                file = base64.b64decode(encoded[: len(encoded) // 4 * 4])
            with Image.open(Reads(file[:BEGINNING], MOST_READS), formats=FORMATS) as image:
                return image.width * image.height
        except Exception:  # Pillow's decoders raise any kind of error
            return math.inf

    def load(self, url: str, param: str) -> Image.Image:
        """Return the image of `url`; raises BadRequest with `param` as the field's name."""
        self.check()
        self.count_image()
        file = self._bytes(url, param)
        key = hashlib.sha256(file).digest()
        picture = self.decoded.get(key)
        if picture is not None:
            self._count_pixels(picture.width * picture.height, param)
        else:
            picture = self._decode(file, param)
            self.decoded.keep(key, picture)
            self.decoded.came_from(url, key)
        return picture

    def check_number(self, sent: int) -> None:
        """Raise BadRequest if a request may not hold so many images."""
        if sent > (most := self.settings.max_images):
            raise BadRequest(
                f"A request may hold at most {most} images; this one has {sent}.", "messages", "too_many_images"
            )

    def count_image(self) -> None:
        """Count an image of the request; raises BadRequest if it has too many."""
        self.count += 1
        self.check_number(self.count)

    def _bytes(self, url: str, param: str) -> bytes:
        limit = self.settings.max_image_bytes
        if url[:5].lower() == "data:":
            header = _DATA_URI.match(url)
            if header is None:
                raise BadRequest(
                    f"'{param}' must be 'data:image/...;base64,' followed by base64.", param, "invalid_image_url"
                )
            if header["type"] and not header["type"].lower().startswith("image/"):
                raise BadRequest(
                    f"'{param}' must hold an image; its type is {cut(header['type'])}.", param, "invalid_image"
                )
            try:
                encoded = plain_base64(url[header.end() :])
                if len(encoded) * 3 // 4 > limit + 3:
                    raise _too_large(param, limit)
                data = base64.b64decode(encoded, validate=True)
            except (binascii.Error, ValueError):
                raise BadRequest(f"'{param}' is not valid base64.", param, "invalid_base64") from None
        elif is_remote(url):
            if url not in self._fetched:
                raise BadRequest(
                    f"'{param}': this server does not fetch remote images; send the image as a base64 data: URI.",
                    param,
                    "remote_images_disabled",
                )
            data = self._fetched[url]
        else:
            raise BadRequest(f"'{param}' must be a base64 data: URI.", param, "invalid_image_url")
        if len(data) > limit:
            raise _too_large(param, limit)
        if not data:
            raise BadRequest(f"'{param}' is empty.", param, "invalid_image")
        return data

    def _decode(self, data: bytes, param: str) -> Image.Image:
        try:
            check(data)
            with Image.open(Reads(data), formats=FORMATS) as image:
                self._count_pixels(image.width * image.height, param)
                _check_shape(*image.size, param)
                image.load()
                if ends_early(data, image):
                    raise _unreadable(param)
                return upright_rgb(image)
        except (Image.DecompressionBombError, Image.DecompressionBombWarning):
            raise self._too_many_pixels(param) from None
        except TooComplex as error:
            raise BadRequest(f"'{param}' {error}.", param, "image_too_complex") from None
        except BadRequest:
            raise
        except Exception:  # Pillow's decoders raise any kind of error for damaged data
            raise _unreadable(param) from None

    def _count_pixels(self, pixels: int, param: str) -> None:
        self.pixels += pixels
        if pixels > self.settings.max_image_pixels:
            raise self._too_many_pixels(param)
        if self.pixels > self.settings.max_request_pixels:
            raise BadRequest(
                f"The images of a request may hold at most {self.settings.max_request_pixels} pixels together.",
                "messages",
                "image_too_large",
            )

    def _too_many_pixels(self, param: str) -> BadRequest:
        return BadRequest(
            f"'{param}' may hold at most {self.settings.max_image_pixels} pixels.", param, "image_too_large"
        )


def is_remote(url: str) -> bool:
    """Return whether an image must be fetched from another host."""
    return url[:8].lower().startswith(("http://", "https://"))


def _too_large(param: str, limit: int) -> BadRequest:
    return BadRequest(f"'{param}' may hold at most {limit} bytes.", param, "image_too_large")


def _check_shape(width: int, height: int, param: str) -> None:
    shorter, longer = sorted((width, height))
    if longer > MAX_SIDE:
        raise BadRequest(f"'{param}' may be at most {MAX_SIDE} pixels wide and high.", param, "image_too_large")
    if longer > MAX_RATIO * shorter:
        raise BadRequest(
            f"A side of '{param}' may be at most {MAX_RATIO} times as long as the other; it has {width} x {height} pixels.",
            param,
            "image_too_narrow",
        )


def _unreadable(param: str) -> BadRequest:
    return BadRequest(
        f"'{param}' is not a readable image; supported formats: {', '.join(FORMATS)}.", param, "invalid_image"
    )
