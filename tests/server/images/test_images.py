"""Images from requests: what is decoded how, and what is refused before it costs memory."""

from __future__ import annotations

import base64
import io
import random
import re
import struct
import zlib
from typing import Any
from urllib.parse import quote, unquote_to_bytes

import numpy as np
import pytest
from PIL import Image
from PIL.AvifImagePlugin import AvifImageFile
from PIL.PngImagePlugin import PngImageFile

from server.errors import BadRequest
from server.images import base64_forms
from server.images.base64_forms import plain_base64
from server.images.load import ImageLoader
from server.settings import Settings
from tests.server.conftest import data_uri
from tests.waiting import computing_within


def load(url: str, **limits: Any) -> Image.Image:
    return ImageLoader(Settings(**limits)).load(url, "image")


def refusal(url: str, **limits: Any) -> str | None:
    with pytest.raises(BadRequest) as caught:
        load(url, **limits)
    assert caught.value.param in ("image", "messages")
    return caught.value.code


def png_header(width: int, height: int) -> bytes:
    """Return a PNG that claims a size and ends where its pixels would begin."""
    body = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + body + struct.pack(">I", zlib.crc32(body)) + b"\0\0\1\0IDAT"


def as_uri(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64," + base64.b64encode(data).decode()


def as_bytes(image: Image.Image, kind: str = "PNG") -> bytes:
    return base64.b64decode(data_uri(image, kind).partition(",")[2])


def corner(image: Image.Image) -> tuple[int, ...]:
    pixel = image.getpixel((0, 0))
    assert isinstance(pixel, tuple)
    return pixel


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "AVIF"])
def test_supported_formats_become_rgb(kind: str) -> None:
    image = load(data_uri(Image.new("RGB", (10, 6), (250, 0, 0)), kind))
    assert (image.mode, image.size) == ("RGB", (10, 6))
    assert np.allclose(corner(image), (250, 0, 0), atol=4)


def test_transparency_is_flattened_on_white() -> None:
    assert corner(load(data_uri(Image.new("RGBA", (4, 4), (255, 0, 0, 0))))) == (255, 255, 255)
    assert corner(load(data_uri(Image.new("RGBA", (4, 4), (255, 0, 0, 51))))) == (255, 204, 204)
    palette = Image.new("P", (4, 4), 0)
    assert corner(load(data_uri(palette, "GIF", transparency=0))) == (255, 255, 255)


@pytest.mark.parametrize("kind", ["JPEG", "AVIF"])
def test_exif_orientation_is_applied(kind: str) -> None:
    image = Image.new("RGB", (20, 10), "white")
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    assert load(data_uri(image, kind, exif=exif)).size == (10, 20)


@pytest.mark.parametrize("kind", ["GIF", "AVIF"])
def test_the_first_frame_of_an_animation_counts(kind: str) -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    image = load(data_uri(frames[0], kind, save_all=True, append_images=frames[1:]))
    assert np.allclose(corner(image), (255, 0, 0), atol=4)


def test_sixteen_bit_grey_is_scaled_not_clipped() -> None:
    grey = Image.fromarray(np.full((4, 4), 0x8000, np.uint16))
    assert corner(load(data_uri(grey))) == (128, 128, 128)


@pytest.mark.parametrize(
    "prefix", ["data:image/png;base64,", "data:;base64,", "data:image/png;charset=x;base64,", "DATA:image/png;BASE64,"]
)
def test_data_uris_in_all_spellings(prefix: str) -> None:
    assert load(prefix + data_uri().partition(",")[2]).size == (84, 84)


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("", "invalid_image_url"),
        ("/etc/passwd", "invalid_image_url"),
        ("file:///etc/passwd", "invalid_image_url"),
        ("ftp://example.com/a.png", "invalid_image_url"),
        ("http://example.com/a.png", "remote_images_disabled"),
        ("HTTPS://example.com/a.png", "remote_images_disabled"),
        ("data:image/png,plain", "invalid_image_url"),
        ("data:text/html;base64,AAAA", "invalid_image"),
        ("data:image/png;base64,", "invalid_image"),
        ("data:image/png;base64,!!!!", "invalid_base64"),
        ("data:image/png;base64,AAAAA", "invalid_base64"),
        ("data:image/png;base64,AA=A", "invalid_base64"),
        ("data:image/png;base64,AAA==", "invalid_base64"),
        ("data:image/png;base64,%4GAAA", "invalid_base64"),
        ("data:image/png;base64,AAA%", "invalid_base64"),
        ("data:image/png;base64,AAA", "invalid_image"),
        ("data:image/png;base64,AA AA", "invalid_image"),
        ("data:image/png;base64,\u00e9AAA", "invalid_base64"),
        (as_uri(b"hello, this is no image"), "invalid_image"),
        (as_uri(b"<svg xmlns='http://www.w3.org/2000/svg'/>", "image/svg+xml"), "invalid_image"),
        (as_uri(png_header(10, 10)), "invalid_image"),
    ],
)
def test_what_is_no_image_is_refused(url: str, code: str) -> None:
    assert refusal(url) == code


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "AVIF"])
def test_truncated_images_are_refused(kind: str) -> None:
    noise = Image.effect_noise((64, 64), 80).convert("RGB")
    data = base64.b64decode(data_uri(noise, kind).partition(",")[2])
    assert refusal(as_uri(data[: len(data) // 2])) == "invalid_image"


def test_formats_beyond_the_list_are_refused_even_if_pillow_knows_them() -> None:
    assert refusal(data_uri(kind="TIFF")) == "invalid_image"


def png(width: int, height: int, pixels: bytes, interlace: int = 0) -> bytes:
    """Return a grey PNG that claims a size, with a stream of pixels that is whole in itself."""
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, interlace)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(pixels)), (b"IEND", b""))
    written = (
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(written)


@pytest.mark.parametrize(
    ("width", "height", "whole", "interlace"),
    [(9, 50, 500, 0), (4, 5, 25, 0), (8, 8, 2 + 2 + 3 + 6 + 10 + 20 + 36, 1), (3, 2, 2 + 2 + 2 + 4, 1)],
)
def test_pixels_that_end_behind_a_row_are_truncated_too(width: int, height: int, whole: int, interlace: int) -> None:
    assert load(as_uri(png(width, height, bytes(whole), interlace))).size == (width, height)
    row = 2 + width // 2 if interlace else width + 1
    assert refusal(as_uri(png(width, height, bytes(whole - row), interlace))) == "invalid_image"


def test_a_line_of_pixels_is_refused_by_its_header(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load(data_uri(Image.new("L", (2, 400)))).size == (2, 400)
    prepared: list[object] = []
    monkeypatch.setattr(PngImageFile, "load_prepare", prepared.append)  # where its memory is taken
    for size in ((1, 39_999_999), (39_999_999, 1), (600, 65_536)):
        assert refusal(as_uri(png(*size, bytes(1000)))) == "image_too_large"
    for size in ((1, 201), (300, 1), (2, 65_535)):
        assert refusal(as_uri(png(*size, bytes(1000)))) == "image_too_narrow"
    assert not prepared


@pytest.mark.parametrize("size", [(50_000, 50_000), (2**31 - 1, 2**31 - 1), (100_000, 900)])
def test_a_bomb_is_refused_by_its_header(size: tuple[int, int]) -> None:
    assert refusal(as_uri(png_header(*size))) == "image_too_large"


def test_a_small_file_of_many_pixels_is_refused_before_they_are_decoded() -> None:
    buffer = io.BytesIO()
    Image.new("1", (7000, 7000)).save(buffer, "PNG")
    assert len(buffer.getvalue()) < 20_000
    assert refusal(as_uri(buffer.getvalue())) == "image_too_large"


def test_a_large_avif_is_refused_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (3000, 2000)).save(buffer, "AVIF", speed=10)
    decoded: list[object] = []
    monkeypatch.setattr(AvifImageFile, "load", decoded.append)
    assert refusal(as_uri(buffer.getvalue(), "image/avif"), max_image_pixels=3000 * 2000 - 1) == "image_too_large"
    assert not decoded


@pytest.mark.parametrize("interlaced", [0, 1])
def test_what_follows_the_pixels_of_a_png_is_not_inflated(interlaced: int) -> None:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    deflate = zlib.compressobj(9)
    pixels = b"".join(deflate.compress(bytes(2**24)) for _ in range(60)) + deflate.flush()  # a gigabyte in one megabyte
    header = struct.pack(">IIBBBBB", 10, 10, 8, 2, 0, 0, interlaced)
    chunks = chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")
    with computing_within(0.5):
        assert load(as_uri(b"\x89PNG\r\n\x1a\n" + chunks)).size == (10, 10)


def spelt(data: bytes, how: str) -> str:
    """Base64 as some clients write it, made by others than what reads it."""
    plain = base64.b64encode(data).decode()
    return {
        "lines": lambda: base64.encodebytes(data).decode(),
        "mail": lambda: base64.encodebytes(data).decode().replace("\n", "\r\n"),
        "percent": lambda: quote(plain, safe=""),
        "lower percent": lambda: re.sub("%..", lambda found: found[0].lower(), quote(plain, safe="")),
        "percent in lines": lambda: quote(base64.encodebytes(data).decode(), safe=""),
        "percent throughout": lambda: "".join(f"%{ord(letter):02x}" for letter in plain),
        "url-safe": lambda: base64.urlsafe_b64encode(data).decode(),
        "url-safe in part": lambda: plain.replace("+", "-"),
        "url-safe in another part": lambda: plain.replace("/", "_"),
        "url-safe, unpadded": lambda: base64.urlsafe_b64encode(data).decode().rstrip("="),
        "unpadded": lambda: plain.rstrip("="),
    }[how]()


@pytest.mark.parametrize(
    "how",
    [
        "lines", "mail", "percent", "lower percent", "percent in lines", "percent throughout", "url-safe",
        "url-safe in part", "url-safe in another part", "url-safe, unpadded", "unpadded",
    ],
)  # fmt: skip
def test_base64_as_clients_write_it(how: str) -> None:
    for size in range(3, 6):  # with and without padding
        data = as_bytes(Image.effect_noise((16, 16), 90).convert("RGB")) + bytes(size)
        assert {"+", "/"} <= set(base64.b64encode(data).decode())
        image = load(f"data:image/png;base64,{spelt(data, how)}")
        assert image.tobytes() == load(as_uri(data)).tobytes()


def test_escapes_are_read_as_urllib_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = random.Random(1)
    for _ in range(3000):
        monkeypatch.setattr(base64_forms, "PIECE", drawn.randint(3, 6))
        text = "".join(drawn.choices("%%%%0123aAfFgG/", k=4 * drawn.randint(1, 5)))
        read = unquote_to_bytes(text).translate(None, b" \n")
        assert plain_base64(text) == read + b"=" * (-len(read) % 4)


def test_escapes_take_no_time_and_no_room() -> None:
    with computing_within(1):
        assert refusal("data:image/png;base64," + "%2B" * 3_000_000) == "invalid_image"


def test_bytes_are_bounded() -> None:
    noise = data_uri(Image.effect_noise((64, 64), 80))
    assert refusal(noise, max_image_bytes=1024) == "image_too_large"
    written = spelt(base64.b64decode(noise.partition(",")[2]), "percent in lines")
    assert refusal(f"data:image/png;base64,{written}", max_image_bytes=1024) == "image_too_large"


def test_remote_images_are_fetched_once_and_only_where_switched_on() -> None:
    data = base64.b64decode(data_uri().partition(",")[2])
    fetched: list[str] = []

    def fetch(url: str, param: str) -> bytes:
        fetched.append(url)
        return data

    loader = ImageLoader(Settings(max_images=3), fetch)
    loader.fetch_remote([("https://a.example/1", "a"), (data_uri(), "b"), ("https://a.example/1", "c")])
    assert loader.load("https://a.example/1", "a").size == (84, 84)
    assert fetched == ["https://a.example/1"]
    with pytest.raises(BadRequest, match="at most 3 images; this one has 9"):
        loader.fetch_remote([(f"https://a.example/{i}", "a") for i in range(9)])
    assert len(fetched) == 1


def test_number_and_sum_of_pixels_are_bounded() -> None:
    loader = ImageLoader(Settings(max_images=2, max_request_pixels=150))
    loader.load(data_uri(Image.new("RGB", (10, 10))), "a")
    with pytest.raises(BadRequest, match="together"):
        loader.load(data_uri(Image.new("RGB", (10, 10))), "b")
    with pytest.raises(BadRequest, match="at most 2 images"):
        loader.load(data_uri(Image.new("RGB", (1, 1))), "c")
