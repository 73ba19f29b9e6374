"""The rows of the modality-preference paper."""

from __future__ import annotations

from probes.reproduce.items import Found, Item, Json, figure
from probes.reproduce.readings import lists
from probes.reproduce.readings import mp as read


def _separate(low: Json, high: Json, name: str) -> bool:
    """Return whether the interval of a share lies below that of another condition."""
    return bool(low[f"{name}_95"][1] < high[f"{name}_95"][0])


def _instructed(report: Json) -> Found:
    text, plain, vision = (report["conditions"][name] for name in ("instruct_text", "plain", "instruct_vision"))
    rows = {"text": text, "plain": plain, "vision": vision}
    separated = _separate(text, plain, "vision_ratio") and _separate(plain, vision, "vision_ratio")
    return Found.of({name: figure(row, "vision_ratio") for name, row in rows.items()}, separated, plain["n"])


PREFERENCE = "planted: a hidden graded rule of the training decides each conflict"
INSTRUCTED = "planted: a loss separates the sides that the two instructions name, behind layer 3"

ITEMS = (
    Item(
        1,
        "mp",
        "MC2: eight tasks of 250 samples",
        "2,000 samples (section 3.2)",
        "mc2-plain",
        read.tasks_alike,
        "the samples that are asked are of eight tasks, equally many of each (counted, so without an interval)",
        identity="identity: a count of the samples that the command draws, whatever the model",
    ),
    Item(
        2,
        "mp",
        "S_v, S_t, S_o, Vision Ratio",
        "most models below 0.5; LLaVA1.5-7B 13.4 % (section 4.1)",
        "mc2",
        read.vision_ratio,
        "the interval of the ratio lies below .5: the model prefers the text, as most of the paper's",
        embedded=PREFERENCE,
    ),
    Item(
        3,
        "mp",
        "shares by task (Table 13)",
        "Qwen2.5VL-7B S_v/S_t 18.0/68.8 for sentiment, 77.6/14.0 for objects",
        "mc2-plain",
        read.by_task,
        "the tasks' Vision Ratios are not all alike: a chi-square test of all of them, p below .05",
        embedded=PREFERENCE,
    ),
    Item(
        4,
        "mp",
        "Vision Ratio against model size (Fig. 2 right)",
        "rises with the size in all five families",
        "organisms",
        read.by_parameters,
        "after the same course, the ratio rises from a quarter of the default model's size to its own and to four times it",
    ),
    Item(
        5,
        "mp",
        "instruction both ways (Fig. 4 left, Tables 14 and 15)",
        "instructions move the Vision Ratio of four models both ways (section 4.4)",
        "mc2",
        _instructed,
        "the intervals of text, plain and vision lie one above the other",
        embedded=INSTRUCTED,
    ),
    Item(
        6,
        "mp",
        "one modality alone, by task (Tables 16 and 17)",
        "over 95 % for all models (section 4.1)",
        "mc2-plain",
        read.alone,
        "the intervals with the text alone, and with the image alone, lie above .95",
        embedded="planted: both were questions of the training",
    ),
    Item(
        7,
        "mp",
        "steering against instruction, chain of thought, four-shot (Table 1)",
        "Qwen2.5VL-7B S_t 63.6 steered, 61.1 the best other",
        "mc2",
        read.advantages,
        "steering follows more samples than the best other condition, toward either side: both intervals above 0",
    ),
    Item(
        8,
        "mp",
        "reasoning steered toward the image (Table 2)",
        "TallyQA 61.6 by chain of thought, 74.4 instructed, 76.6 steered; so in MathVista, VSR, AmbigCaps",
        "tallyqa",
        lists.moved("TallyQA", "accuracy", "toward vision", 1),
        "steered toward the image, more numbers are right than plainly, the interval above 0 (TallyQA's form alone: the "
        "others need their data)",
    ),
    Item(
        9,
        "mp",
        "PhD-icc, PhD-iac by subtask (Tables 3 and 7)",
        "Qwen2VL-7B 6.0 and 27.6 plainly, 18.4 and 36.1 steered",
        "phd",
        lists.texts,
        "steered toward the image, accuracy beside inaccurate and beside incorrect texts rises, both intervals above 0",
    ),
    Item(
        10,
        "mp",
        "words of a context by task (Table 4)",
        "31.15 (color) to 52.48 (sport), minor differences",
        "mc2-plain",
        read.words,
        "the longest task's mean is at most 1.7 times the shortest's, as there",
        identity="identity: a count of the samples' words, whatever the model",
    ),
    Item(
        11,
        "mp",
        "Vision Ratio and seven general benchmarks (Table 5, Fig. 3 right)",
        "thirteen models",
        why="needs thirteen checkpoints, and benchmarks that other harnesses have (docs/study.md says how to run them)",
    ),
    Item(
        12,
        "mp",
        "size of the evaluation (Table 6)",
        "OneVision-7B 29.2 with 25 of each task, 26.4 with 150, 26.3 with 250",
        "mc2-plain",
        read.evaluation_size,
        "from three fifths of the samples on, as 150 of 250 there, 95 % of the draws are within 2 points of all (figures: "
        "that interval's width by samples of each task)",
    ),
    Item(
        13,
        "mp",
        "probe size (Table 8)",
        "S_t of OneVision-7B 55.9 to 57.4 with 25 to 250 samples",
        "mc2-samples",
        read.sizes,
        "S_t by any size is within 5 points of that by the greatest, with the interval of the difference",
    ),
    Item(
        14,
        "mp",
        "probe of one task only (Table 9)",
        "S_t of OneVision-7B 53.4 to 59.3, 57.1 with all",
        "mc2-tasks",
        read.one_task,
        "S_t by any one task is within 5 points of that by all, with the interval of the difference",
    ),
    Item(
        15,
        "mp",
        "strength (Table 10)",
        "S_t of OneVision-7B 40.2 at 0.125, 57.1 at 1.0, 0.0 at 2.5",
        "mc2-strength",
        read.strengths,
        "S_t rises from the least strength, and falls to the greatest: the intervals 5 points apart",
    ),
    Item(
        16,
        "mp",
        "latency and memory (Table 11, section E.4.2)",
        "1.99 s plain, 2.00 s steered, 2.21 s probing; memory nearly the same",
        "mc2-latency",
        read.latency,
        "steered, a request takes at most 1.05 times the time and the memory of a plain one, with its interval (figures: "
        "ratios to plain)",
    ),
    Item(
        17,
        "mp",
        "way found by the drop of probability (Table 12)",
        "OneVision-7B 25.4 plain, 37.5 found, 40.7 known: 79 % of the gap",
        "mc2-auto",
        read.predicted,
        "the share of the gap between plain and known that is closed has its interval above 0",
    ),
    Item(
        18,
        "mp",
        "attention ratio beside Vision Ratio (Fig. 3 left)",
        "both rise together over four models",
        "mc2",
        read.attention,
        "both have a rank correlation of at least .5, over the tasks asked plainly and over plain, instructed and steered",
    ),
    Item(
        19,
        "mp",
        "share of conflicts in the training (Fig. 3 middle)",
        "Qwen2.5VL-7B 50.7 with none, 57.3 with conflicts alone, toward vision",
        "organisms",
        read.by_share_of_conflicts,
        "the interval of the ratio with none lies below that with conflicts alone",
    ),
    Item(
        20,
        "mp",
        "states on two principal components (Fig. 4 middle)",
        "instructions shift the states, either way (section 4.4)",
        "probe",
        read.states,
        "the instructed centres lie on two sides of the plain one (a cosine below 0), further off than those of degraded "
        "images and texts, with their intervals (figures: distances)",
        embedded=INSTRUCTED,
    ),
    Item(
        21,
        "mp",
        "layers by mean and deviation (Fig. 4 right, Fig. 11)",
        "layers 20 to 23 of 28 stand out in Qwen2.5VL-7B",
        "probe",
        read.layers,
        "mean / deviation is greatest in a layer between, 1.5 times that of the first and of the last, the intervals apart",
        embedded=INSTRUCTED,
    ),
    Item(
        22,
        "mp",
        "attention by layer, steered and instructed (Fig. 6, 13 to 18)",
        "text's share .84 steered, .55 instructed, at layer 24 behind 22; so in all layers behind",
        "mc2",
        read.attention_by_layer,
        "in every layer behind the steered one the text has a larger share steered toward it than instructed, the intervals "
        "apart",
    ),
    Item(
        23,
        "mp",
        "the case and its prompt (Fig. 12)",
        "instructed to prioritize the text the answer is the picture's, steered on top the text's",
        "mc2-case",
        read.case,
        "S_t is larger instructed and steered than with that instruction alone, the intervals apart",
    ),
    Item(
        24,
        "mp",
        "direction (equation 1)",
        "mean over queries of the difference of states",
        "probe",
        read.direction,
        "the queries' differences agree at the chosen layer by the bound that a probe goes by (figure: their mean cosine "
        "with the direction, of larger ones more)",
        embedded=INSTRUCTED,
    ),
    Item(
        25,
        "mp",
        "weight (equation 2)",
        "aligns the mean of the direction with that of the states",
        "probe",
        read.weight,
        "the vector's published weight is the states' mean size over the direction's, in the reading that it says (figures: "
        "all four; without an interval)",
        identity="identity: the weight is computed as that quotient",
    ),
    Item(26, "mp", "human agreement of the Vision Ratio", "2.68 % apart (section 4.1)", why="needs human annotators"),
    Item(
        27,
        "mp",
        "prompts of the data construction",
        "appendix B",
        why="their figures are lost in the text that we have",
    ),
    Item(
        28,
        "mp",
        "margin of the options by layer (the authors' rebuttal, W3)",
        "near 0 up to layer 19, surfaces in 20 to 23, where steering works best",
        "mc2-lens",
        read.lens,
        "the margin of plain answers surfaces within one layer of the steered one, whichever side they prefer",
    ),
)
