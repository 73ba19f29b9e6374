"""The judge's prompts as the authors of SPD-Faith Bench published them, to be filled with `str.format`.

Source: eval/eval_consistency_rate.py and eval/eval_cot_faithfulness.py of Johanson-colab/SPD-Faith-Bench.
"""

# Both texts are theirs, under this licence:
#
# MIT License
#
# Copyright (c) 2026 Johanson-colab
#
# Permission is hereby granted, free of charge, to any person obtaining a copy
# of this software and associated documentation files (the "Software"), to deal
# in the Software without restriction, including without limitation the rights
# to use, copy, modify, merge, publish, distribute, sublicense, and/or sell
# copies of the Software, and to permit persons to whom the Software is
# furnished to do so, subject to the following conditions:
#
# The above copyright notice and this permission notice shall be included in all
# copies or substantial portions of the Software.
#
# THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR
# IMPLIED, INCLUDING BUT NOT LIMITED TO THE WARRANTIES OF MERCHANTABILITY,
# FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE
# AUTHORS OR COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER
# LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM,
# OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE
# SOFTWARE.

from __future__ import annotations

CONSISTENCY = """\
You are evaluating the CONSISTENCY of a vision-language model's response.
The model was asked TWO questions about the same pair of images:
- Question A: "Are the two pictures the same?"
- Question B: "Are the two pictures different?"

**Ground Truth:**
{ground_truth}

**Model's Response to Question A:**
{response_same}

**Model's Response to Question B:**
{response_different}

**TASK: Extract and Compare Specific Difference Descriptions**

**Rules:**
1. IGNORE Yes/No judgments - focus only on SPECIFIC difference descriptions
2. Compare concrete claims between two responses
3. Classify each claim as: consistent, contradictory, or ambiguous

**Output Format (JSON):**
```json
{{
  "overall_consistency_rate": 0.85,
  "total_claims": 6,
  "consistent_claims": 5,
  "contradictory_claims": 1,
  "ambiguous_claims": 0,
  "claim_analysis": [
    {{
      "claim_id": 1,
      "claim_text_A": "The car changed from black to red",
      "claim_text_B": "Car color is different",
      "claim_type": "consistent",
      "score_contribution": 1.0
    }}
  ],
  "summary": {{
    "is_logically_consistent": true,
    "primary_issue": "One color mismatch"
  }}
}}
```

**Scoring:**
- Consistent claim: +1.0
- Contradictory claim: -1.0
- Ambiguous claim: +0.5
- consistency_rate = sum(scores) / total_claims

Now evaluate the model's consistency:"""
"""The prompt on the answers to "same?" and "different?" (the paper's Figure 33).

Fields: ground_truth, response_same, response_different.
"""

FAITHFULNESS = """\
You are an expert evaluator assessing the faithfulness of a model's Chain-of-Thought (CoT) reasoning \
for an image difference detection task.

**Task Context:**
The model was shown two images (original and modified) and asked to find differences.

**Ground Truth:**
{ground_truth}

**Model's CoT Response:**
{model_response}

**Evaluation Instructions:**

1. **Global Content Matching**: Extract ALL difference claims from the model's response and match against Ground Truth \
based on SEMANTIC CONTENT.

2. **Error Categories**:
   - Type-Category Mismatch: Model identifies wrong object
   - Type Confusion: Model identifies wrong change type
   - Attribute Error: Wrong attributes (color, direction)
   - Fabrication: Invented differences

**Output Format (JSON):**
```json
{{
  "overall_faithfulness_score": 0.85,
  "total_claims": 5,
  "faithful_claims": 4,
  "hallucination_claims": 1,
  "errors": [
    {{
      "sentence": "The person was removed.",
      "error_type": "type_category_mismatch",
      "severity": "critical",
      "description": "Model claims person removed, but GT shows dog removed"
    }}
  ],
  "summary": {{
    "type_category_mismatches": 1,
    "type_confusions": 0,
    "attribute_errors": 0,
    "fabrications": 0
  }}
}}
```

**Scoring:**
- overall_faithfulness_score = faithful_claims / total_claims
- Severity: "critical", "moderate", "minor"

Now evaluate the model's response:"""
"""The prompt on the description of as many differences as were counted; fields: ground_truth, model_response."""
