"""The openai package, whichever version: what its README shows."""

import openai
from asked import MODEL, QUESTION, SHOWN, Colour, end, see

client = openai.OpenAI(max_retries=0)
ask = client.chat.completions.create
TOOL = openai.pydantic_function_tool(Colour)
plain = [{"role": "user", "content": QUESTION}]
see("models", lambda: [one.id for one in client.models.list()])
see("plain", lambda: ask(model=MODEL, messages=plain).choices[0].message.content)
see("stream", lambda: [c.choices[0].delta.content for c in ask(model=MODEL, messages=plain, stream=True)])
see("picture", lambda: ask(model=MODEL, messages=[{"role": "user", "content": SHOWN}]).choices[0].message.content)
parse = client.chat.completions.parse
shown = [{"role": "user", "content": SHOWN}]
see("parse", lambda: parse(model=MODEL, messages=shown, response_format=Colour).choices[0].message.parsed)


def streamed() -> object:
    with client.chat.completions.stream(
        model=MODEL, messages=plain, response_format=Colour, stream_options={"include_usage": True}
    ) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    return final.choices[0].message.parsed, final.usage


see("parse, streamed", streamed)
see("json", lambda: ask(model=MODEL, messages=plain, response_format={"type": "json_object"}, max_tokens=16).choices[0])
raw = client.chat.completions.with_raw_response.create
see("raw", lambda: raw(model=MODEL, messages=plain).headers["x-request-id"])
see("tools", lambda: ask(model=MODEL, messages=plain, tools=[TOOL]))
see("no such model", lambda: ask(model="gpt-4o", messages=plain))
see("completions", lambda: client.completions.create(model=MODEL, prompt=QUESTION))
see("embeddings", lambda: client.embeddings.create(model=MODEL, input=QUESTION))
end("openai")
