"""lm-eval's local-chat-completions."""

from asked import MODEL, QUESTION, URL, end, see
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalChatCompletion


def ask(model: str, count: int, **fields: object) -> object:
    lm = LocalChatCompletion(
        base_url=f"{URL}/chat/completions", model=model, num_concurrent=count, max_retries=1, tokenized_requests=False
    )
    chat = lm.apply_chat_template([{"role": "user", "content": QUESTION}])
    asked = [Instance("generate_until", {}, (chat, {"until": ["\n\n"], **fields}), 0) for _ in range(count)]
    return lm.generate_until(asked, disable_tqdm=True)


see("one", lambda: ask(MODEL, 1))
see("several", lambda: ask(MODEL, 2, do_sample=True, temperature=0.7, max_gen_toks=16))
see("no such model", lambda: ask("gpt-4o", 1))
end("lm_eval")
