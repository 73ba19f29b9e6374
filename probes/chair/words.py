"""The objects that a description names: synonyms, plurals, and phrases with another meaning."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

COCO = """
person man woman boy girl child kid baby toddler lady guy gentleman people player skier snowboarder surfer
skateboarder rider cyclist pedestrian passenger worker chef officer adult teenager crowd | bicycle bike | car
automobile sedan suv taxi cab | motorcycle motorbike motor_bike motor_cycle moped | airplane plane aeroplane air_plane
jet aircraft | bus minibus | train locomotive tram | truck pickup lorry | boat ship canoe kayak sailboat ferry yacht |
traffic_light traffic_signal stop_light stoplight | fire_hydrant hydrant | stop_sign | parking_meter | bench | bird
pigeon seagull duck parrot owl goose penguin chicken | cat kitten | dog puppy | horse pony foal | sheep lamb | cow
calf cattle bull ox | elephant | bear panda | zebra | giraffe | backpack rucksack knapsack | umbrella parasol |
handbag purse | tie necktie bow_tie bowtie | suitcase suit_case luggage | frisbee | skis ski | snowboard | sports_ball
ball baseball football basketball tennis_ball soccer_ball | kite | baseball_bat | baseball_glove | skateboard |
surfboard | tennis_racket racket racquet | bottle | wine_glass | cup mug | fork | knife | spoon | bowl | banana |
apple | sandwich burger hamburger | orange | broccoli | carrot | hot_dog hotdog | pizza | donut doughnut | cake
cupcake cheesecake | chair seat stool armchair | couch sofa loveseat | potted_plant houseplant | bed | dining_table
table | toilet | tv television | laptop laptop_computer | mouse | remote remote_control | keyboard | cell_phone phone
mobile_phone smartphone cellphone | microwave | oven stove stove_top_oven | toaster | sink | refrigerator fridge
freezer | book | clock | vase | scissors | teddy_bear | hair_drier hair_dryer | toothbrush
"""
"""COCO's categories with our synonyms: one group each, its name first."""

NOTHING = (
    "home plate",
    "train track",
    "baseball field",
    "baseball game",
    "tennis court",
    "football field",
    "hot dog stand",
)
"""Phrases that name no object, although their words do."""
ANIMALS = ("bird", "cat", "dog", "horse", "sheep", "cow", "elephant", "bear", "zebra", "giraffe")
QUALIFIED = {"baby": ANIMALS, "adult": ANIMALS, "passenger": ("airplane", "train")}
"""Words for people that only qualify such an object when they precede it."""
IRREGULAR = {
    "man": "men", "woman": "women", "child": "children", "person": "persons", "gentleman": "gentlemen", "knife": "knives",
    "mouse": "mice", "goose": "geese", "calf": "calves", "ox": "oxen",
}  # fmt: skip


@dataclass(frozen=True)
class Vocabulary:
    """names: the object that each word or phrase means, None if it means none."""

    names: Mapping[str, str | None]

    @classmethod
    def of(cls, groups: Iterable[Sequence[str]]) -> Vocabulary:
        """Return the vocabulary of groups of synonyms, each with its object's name first."""
        names: dict[str, str | None] = dict.fromkeys(NOTHING)
        for name, *synonyms in groups:
            for word in (name, *synonyms):
                names[word] = name
        more = {
            f"{before} {word}": name
            for word, name in names.items()
            for before, objects in QUALIFIED.items()
            if name in objects
        }
        return cls({**names, **more, "toilet seat": names.get("toilet")})

    @classmethod
    def read(cls, file: Path) -> Vocabulary:
        """Return the vocabulary of a file with one comma-separated group per line, as CHAIR's authors publish theirs."""
        lines = file.read_text(encoding="utf-8").splitlines()
        return cls.of([word.strip().lower() for word in line.split(",")] for line in lines if line.strip())

    @cached_property
    def _forms(self) -> Mapping[str, str | None]:
        return {form: name for word, name in self.names.items() for form in _forms(word)}

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        longest = sorted(self._forms, key=len, reverse=True)
        return re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, longest))})(?!\w)")

    def mentioned(self, text: str) -> list[str]:
        """Return the objects of a text, each as often as it is mentioned; the longest phrase at a place counts.

        In a text that mentions a toilet, a seat is not a chair.
        """
        words = self._pattern.findall(text.lower().replace("-", " "))
        mentioned = [(word, self._forms[word]) for word in words]
        toilet = any(name == "toilet" for _, name in mentioned)
        return [name for word, name in mentioned if name and not (toilet and word in ("seat", "seats"))]


def coco() -> Vocabulary:
    """Return our vocabulary of COCO's categories."""
    groups = [group.split() for group in COCO.split("|")]
    return Vocabulary.of([word.replace("_", " ") for word in group] for group in groups)


def _forms(word: str) -> Iterator[str]:
    """Yield a word or phrase, and its plural."""
    first, _, last = word.rpartition(" ")
    yield word
    regular = re.sub("(?<=[^aeiou])y$", "ie", last) + ("es" if last.endswith(("s", "x", "ch", "sh", "z")) else "s")
    yield f"{first} {IRREGULAR.get(last, regular)}".strip()
