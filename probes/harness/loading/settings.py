"""Settings of how a model is loaded, the same for `serve` and for every command that runs a model in its own process."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class ModelSettings(BaseModel):
    """A checkpoint, and how it is loaded."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)  # --help needs no validators

    model: str = Field(default="", description="checkpoint folder, Hugging Face name, or demo:NAME")
    chat_template: str | None = Field(
        default=None, description="file with a Jinja chat template that replaces the checkpoint's own"
    )
    dtype: str = Field(default="auto", description="weights: auto, float32, bfloat16, float16")
    quantization: Literal["int8"] | None = Field(
        default=None, description="int8: the language model's layers compute in 8-bit integers"
    )
    device: str = Field(default="auto", description="auto, cpu, cuda, cuda:1, ...")
    device_map: Literal["auto"] | None = Field(
        default=None,
        description="auto spreads a model that is larger than a GPU over all of them (needs the extra parallel)",
    )
    download: bool = Field(default=False, description="allow fetching the model from the Hugging Face hub")
