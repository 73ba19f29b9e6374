"""LangChain's ChatOpenAI over responses."""

from asked import MODEL, QUESTION, SHOWN, Colour, end, get_weather, see
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_openai import ChatOpenAI


def model(name: str = MODEL, **fields: object) -> ChatOpenAI:
    return ChatOpenAI(model=name, max_retries=0, use_responses_api=True, **fields)


shown = [SystemMessage("Be brief."), HumanMessage(SHOWN)]
see("plain", lambda: model().invoke(QUESTION).text)
see("stream", lambda: [chunk.text for chunk in model().stream(QUESTION)])
see("picture", lambda: model().invoke(shown).content)
see("json_schema", lambda: model().with_structured_output(Colour, method="json_schema").invoke(shown))
see("function_calling: tools", lambda: model().with_structured_output(Colour, method="function_calling").invoke(shown))


def called() -> object:
    bound = model(max_tokens=160, extra_body={"seed": 3})
    chat = [HumanMessage(QUESTION)]
    first = bound.bind_tools([get_weather], tool_choice="any").invoke(chat)
    came = [ToolMessage("Fine in Bern.", tool_call_id=call["id"]) for call in first.tool_calls]
    return first.tool_calls, bound.bind_tools([get_weather]).invoke([*chat, first, *came]).text


see("tools", called)


def chain() -> object:
    bound = model(store=True, use_previous_response_id=True)
    chat = [HumanMessage(SHOWN)]
    return bound.invoke([*chat, bound.invoke(chat), HumanMessage("Sure?")]).text


see("chain", chain)
see("no such model", lambda: model("gpt-4o").invoke(QUESTION))
end("langchain-openai")
