"""COCO's annotations: the objects of an image are those that its instances and its captions name."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from probes.chair.samples import Described
from probes.chair.words import Vocabulary, coco
from probes.harness.reading import parsed, text_of
from probes.image_qa import rows


def load(data: Sequence[Path], images: Path, left_out: list[str] | None = None) -> list[Described]:
    """Return the images of these files that are in the folder.

    data: COCO's instances*.json and, if there are any, its captions*.json; a .txt replaces our list of synonyms. Images that
    are not in the folder are not asked about, so that `left_out` stays unchanged. Raises ValueError that names the invalid
    file, or if no image is there.
    """
    lists = [file for file in data if file.suffix == ".txt"]
    vocabulary = Vocabulary.read(lists[0]) if lists else coco()
    objects: dict[int, set[str]] = {}
    names: dict[int, str] = {}
    captions: dict[int, list[str]] = defaultdict(list)
    for file in data:
        if file.suffix == ".txt":
            continue
        text = text_of(file)
        try:
            content = parsed(text)
            names |= {int(image["id"]): str(image["file_name"]) for image in content["images"]}
            if "categories" in content:
                for number, kinds in _instances(content, vocabulary).items():
                    objects.setdefault(number, set()).update(kinds)
            else:
                for annotation in content["annotations"]:
                    captions[int(annotation["image_id"])].append(annotation["caption"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{file} is not a file of COCO annotations: {_why(error)}") from error
    if not objects:
        raise ValueError("--data needs COCO's instances_*.json, which lists the objects of each image")
    samples = []
    for number, objects_of_image in objects.items():
        place = _find_image(images, names[number])
        if place is not None:
            mentioned = vocabulary.mentioned("\n".join(captions[number]))
            samples.append(Described(place, frozenset(objects_of_image.union(mentioned)), vocabulary, id=place.stem))
    if not samples:
        raise ValueError(f"{images} holds none of the {len(objects)} images of {data[0]}")
    return samples


def _why(error: Exception) -> str:
    """Return what is wrong with the content of a file, in words."""
    if isinstance(error, KeyError):
        return f"it lacks {error}"
    return str(error) if isinstance(error, ValueError) else "its parts are not of the types that COCO's have"


def _instances(content: Mapping[str, Any], vocabulary: Vocabulary) -> dict[int, set[str]]:
    kinds = {}
    for category in content["categories"]:
        kinds[category["id"]] = vocabulary.names.get(str(category["name"]))
        if kinds[category["id"]] is None:
            raise ValueError(f"the synonyms lack the category {category['name']}")
    objects: dict[int, set[str]] = {int(image["id"]): set() for image in content["images"]}
    for annotation in content["annotations"]:
        objects[int(annotation["image_id"])].add(str(kinds[annotation["category_id"]]))
    return objects


def _find_image(folder: Path, name: str) -> Path | None:
    try:
        return rows.image(folder, name)
    except ValueError:
        return None
