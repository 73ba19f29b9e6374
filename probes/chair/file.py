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


def load(data: Sequence[Path], images: Path, left: list[str] | None = None) -> list[Described]:
    """Return the images of these files that are in the folder.

    data: COCO's instances*.json and, if there are any, its captions*.json; a .txt replaces our list of synonyms. Images that
    are not in the folder are not asked about, so that `left` stays unchanged. Raises ValueError that names the invalid file,
    or if no image is there.
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
            names |= {int(one["id"]): str(one["file_name"]) for one in content["images"]}
            if "categories" in content:
                for number, kinds in _instances(content, vocabulary).items():
                    objects.setdefault(number, set()).update(kinds)
            else:
                for one in content["annotations"]:
                    captions[int(one["image_id"])].append(one["caption"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{file} is not a file of COCO annotations: {error!r}") from error
    if not objects:
        raise ValueError("--data needs COCO's instances_*.json, which lists the objects of each image")
    found = []
    for number, own in objects.items():
        place = _there(images, names[number])
        if place is not None:
            told = vocabulary.mentioned("\n".join(captions[number]))
            found.append(Described(place, frozenset(own.union(told)), vocabulary, id=place.stem))
    if not found:
        raise ValueError(f"{images} holds none of the {len(objects)} images of {data[0]}")
    return found


def _instances(content: Mapping[str, Any], vocabulary: Vocabulary) -> dict[int, set[str]]:
    kinds = {}
    for one in content["categories"]:
        kinds[one["id"]] = vocabulary.names.get(str(one["name"]))
        if kinds[one["id"]] is None:
            raise ValueError(f"the synonyms lack the category {one['name']}")
    found: dict[int, set[str]] = {int(one["id"]): set() for one in content["images"]}
    for one in content["annotations"]:
        found[int(one["image_id"])].add(str(kinds[one["category_id"]]))
    return found


def _there(folder: Path, name: str) -> Path | None:
    try:
        return rows.image(folder, name)
    except ValueError:
        return None
