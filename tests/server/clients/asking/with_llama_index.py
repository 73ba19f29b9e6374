"""LlamaIndex's OpenAILike, its class for servers such as this one."""

from asked import MODEL, PICTURE, QUESTION, URL, Colour, end, get_weather, see
from llama_index.core.llms import ChatMessage, ImageBlock, TextBlock
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike


def served(model: str = MODEL, **fields: object) -> OpenAILike:
    return OpenAILike(model=model, api_base=URL, api_key="none", is_chat_model=True, max_retries=0, **fields)


shown = [ChatMessage(role="user", blocks=[TextBlock(text=QUESTION), ImageBlock(url=PICTURE)])]
tool = FunctionTool.from_defaults(get_weather)
prompt = PromptTemplate(QUESTION)
see("plain", lambda: served().chat([ChatMessage(QUESTION)]).message.content)
see("complete", lambda: served().complete(QUESTION).text)
see("stream", lambda: [chunk.delta for chunk in served().stream_chat([ChatMessage(QUESTION)])])
see("picture", lambda: served().chat(shown).message.content)
see("schema", lambda: served(should_use_structured_outputs=True).structured_predict(Colour, prompt))
see("prompted", lambda: served(max_tokens=32).structured_predict(Colour, prompt))
see("tools", lambda: served(is_function_calling_model=True).chat_with_tools([tool], user_msg=QUESTION))
see("no such model", lambda: served("gpt-4o").chat([ChatMessage(QUESTION)]))
end("llama-index-llms-openai-like")
