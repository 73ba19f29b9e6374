"""LangChain's ChatOpenAI."""

from asked import MODEL, QUESTION, SHOWN, Colour, end, get_weather, see
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI

model = ChatOpenAI(model=MODEL, max_retries=0)
shown = [SystemMessage("Be brief."), HumanMessage(SHOWN)]
see("plain", lambda: model.invoke(QUESTION).content)
see("stream", lambda: [chunk.content for chunk in model.stream(QUESTION)])
see("picture", lambda: model.invoke(shown).content)
for method in ("json_schema", "json_mode"):
    see(method, lambda method=method: model.bind(max_tokens=32).invoke(QUESTION, response_format={"type": "json_object"})
        if method == "json_mode" else model.with_structured_output(Colour, method=method).invoke(shown))  # fmt: skip
see("function_calling", lambda: model.with_structured_output(Colour, method="function_calling").invoke(shown))
see("tools", lambda: model.bind_tools([get_weather]).invoke(QUESTION))
see("batch", lambda: [one.content for one in model.batch([QUESTION, "Where is it?"])])
see("no such model", lambda: ChatOpenAI(model="gpt-4o", max_retries=0).invoke(QUESTION))
end("langchain-openai")
