"""lmms-eval's `openai` model: documents with pictures, one at a time and several at once."""

import base64
import io

from asked import MODEL, PICTURE, QUESTION, URL, end, see
from lmms_eval.api.instance import Instance
from lmms_eval.models.chat.openai import OpenAICompatible
from PIL import Image

image = Image.open(io.BytesIO(base64.b64decode(PICTURE.split(",")[1])))


def messages(doc: list) -> list:
    """Return the messages that a task makes of a document."""
    return [{"role": "user", "content": doc}]


def ask(model: str, *docs: list, **fields: object) -> object:
    lmm = OpenAICompatible(model, base_url=URL, api_key="none", max_retries=1, num_concurrent=len(docs))
    lmm.task_dict["task"] = {"test": docs}
    noted = {"task": "task", "doc_id": 0, "repeats": 1}
    asked = [(QUESTION, messages, fields, index, "task", "test") for index in range(len(docs))]
    answers = lmm.generate_until([Instance("generate_until", one, 0, noted) for one in asked])
    return [getattr(one, "text", one) for one in answers]


text = {"type": "text", "text": QUESTION}
shown = [{"type": "image", "url": image}, text]
see("picture", lambda: ask(MODEL, shown))
see("preset", lambda: ask(f"{MODEL}@vision", shown, max_new_tokens=16, temperature=0))
see(
    "several",
    lambda: ask(MODEL, shown, [text], max_new_tokens=8, temperature=0.5, top_p=0.9, do_sample=True, until=["\n"]),
)
see("no such model", lambda: ask("gpt-4o", [text]))
end("lmms_eval")
