"""Instructor, in each mode that a local server is told to be used with."""

import instructor
import openai
from asked import MODEL, QUESTION, SHOWN, Colour, end, see

shown = [{"role": "user", "content": SHOWN}]
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA, instructor.Mode.JSON, instructor.Mode.MD_JSON):
    client = instructor.from_openai(openai.OpenAI(max_retries=0), mode=mode)
    see(mode.name, lambda client=client: client.chat.completions.create(
        model=MODEL, response_model=Colour, messages=shown, max_retries=1, max_tokens=64))  # fmt: skip
client = instructor.from_openai(openai.OpenAI(max_retries=0), mode=instructor.Mode.JSON_SCHEMA)
plain = [{"role": "user", "content": QUESTION}]
see("no model", lambda: client.chat.completions.create(model=MODEL, response_model=None, messages=plain).choices[0])
see(
    "partial",
    lambda: list(
        client.chat.completions.create_partial(model=MODEL, response_model=Colour, messages=plain, max_tokens=64)
    )[-1],
)
see("no such model", lambda: client.chat.completions.create(model="gpt-4o", response_model=Colour, messages=plain))
end("instructor")
