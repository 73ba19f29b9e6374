"""The openai package's responses: what its README shows, and chains."""

import openai
from asked import MODEL, PICTURE, QUESTION, Colour, end, see

client = openai.OpenAI(max_retries=0)
ask = client.responses.create
TOOL = openai.pydantic_function_tool(Colour)
FUNCTION = {"type": "function", **TOOL["function"]}
shown = [{"role": "user", "content": [
    {"type": "input_text", "text": QUESTION}, {"type": "input_image", "image_url": PICTURE, "detail": "auto"},
]}]  # fmt: skip
see("plain", lambda: ask(model=MODEL, input=QUESTION).output_text)
see("instructions", lambda: ask(model=MODEL, input=QUESTION, instructions="Be brief.").output_text)
see("stream", lambda: [event.type for event in ask(model=MODEL, input=QUESTION, stream=True)])
see("picture", lambda: ask(model=MODEL, input=shown).output_text)
see("parse", lambda: client.responses.parse(model=MODEL, input=shown, text_format=Colour).output_parsed)


def streamed(**fields: object) -> object:
    with client.responses.stream(model=MODEL, input=shown, **fields) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    return len(kinds), kinds[-1], final.output_parsed, [item.type for item in final.output], final.usage


see("stream, accumulated", streamed)
see("parse, streamed", lambda: streamed(text_format=Colour))
see("scores", lambda: ask(model=MODEL, input=QUESTION, include=["message.output_text.logprobs"], top_logprobs=2)
    .output[0].content[0].logprobs[0])  # fmt: skip


def extras() -> object:
    body = {"steering": {"toward": "vision"}, "diagnostics": True, "unheard_of": 1}
    whole = ask(model=MODEL, input=shown, extra_body=body)
    with client.responses.stream(model=MODEL, input=shown, extra_body=body) as stream:
        last = list(stream)[-1].response
    return [sorted(one.model_extra or {}) for one in (whole, last)]


see("extras", extras)


def chain() -> object:
    first = ask(model=MODEL, input=shown, store=True)
    second = ask(model=MODEL, input="Sure?", previous_response_id=first.id, store=True)
    with client.responses.stream(model=MODEL, input="Why?", previous_response_id=second.id, store=True) as stream:
        third = stream.until_done().get_final_response()
    items = [item.type for item in client.responses.input_items.list(third.id)]
    kept = client.responses.retrieve(third.id).output_text == third.output_text
    client.responses.delete(first.id)
    return items, kept, client.responses.retrieve(second.id).status


see("chain", chain)


def called() -> object:
    chat = [*shown]
    short = {"tools": [FUNCTION], "max_output_tokens": 160, "extra_body": {"seed": 3}}
    first = ask(model=MODEL, input=chat, tool_choice="required", **short)
    chat += first.output
    came = [{"type": "input_text", "text": "Closer:"}, {"type": "input_image", "image_url": PICTURE, "detail": "auto"}]
    chat += [{"type": "function_call_output", "call_id": call.call_id, "output": came} for call in first.output]
    return first.output, ask(model=MODEL, input=chat, **short).status


see("tools", called)
see(
    "parse tools",
    lambda: client.responses.parse(model=MODEL, input=shown, tools=[TOOL], tool_choice="required").output[0],
)
see("tools, streamed", lambda: streamed(tools=[TOOL], tool_choice="required", max_output_tokens=320))
see("no such model", lambda: ask(model="gpt-4o", input=QUESTION))
see("hosted tool", lambda: ask(model=MODEL, input=QUESTION, tools=[{"type": "web_search"}]))
see("no such response", lambda: ask(model=MODEL, input=QUESTION, previous_response_id="resp_0"))
end("openai")
