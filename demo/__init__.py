"""The embedded models: a synthetic picture world, their training recipes, the checkpoints that ship."""

from pathlib import Path

CHECKPOINT = Path(__file__).parent / "checkpoint"
"""The default model's folder."""
CHECKPOINTS = Path(__file__).parent / "checkpoints"
"""The folder that holds the folders of the other models that ship."""
PREFIX = "demo:"


def shipped() -> dict[str, Path]:
    """Return the folders of the models that ship, by name."""
    return {"default": CHECKPOINT} | {
        config.parent.name: config.parent for config in sorted(CHECKPOINTS.glob("*/config.json"))
    }


def located(model: str) -> str:
    """Return the folder of `demo:NAME`, or any other model as it is named; raise ValueError for one that does not ship."""
    if not model.startswith(PREFIX):
        return model
    name, folders = model.removeprefix(PREFIX), shipped()
    if name not in folders:
        raise ValueError(
            f"the model {model!r} is not shipped, {' and '.join(PREFIX + name for name in folders)} are; "
            "'helmsight demo train --organism NAME' trains others into build/organisms/NAME/checkpoint"
        )
    return str(folders[name])
