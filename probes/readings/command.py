"""`helmsight eval readings`: See alone in every reading on POPE, to decide which formula the paper's figures are of."""

from __future__ import annotations

from probes.image_qa.benchmark import listed

BENCHMARK = listed(
    "readings",
    help="See in every reading of its formula on POPE, judged by the paper's rise and fall",
    description="The SAGE paper's text lost the formula of See, and its Table 11 has POPE's accuracy by alpha: 79.8 without "
    "See, 86.1 at 0.1, 81.4 at 0.2 (LLaVA-1.5-7B). Ask POPE's questions (--data, --images) under See alone in each reading, "
    "at alpha 0.05, 0.1, 0.15 and 0.2. A reading is accepted if accuracy is greatest at 0.05 or 0.1, above that without "
    "See, and 3 to 6 points lower at twice that.",
    limit=9000,
    unit="questions",
    only_own=True,
)
