"""An agent that knows nothing of training: it asks a model through OpenAI's client, and checks what it gets."""

import re

from openai import AsyncOpenAI

ASK_AGAIN = "That is no number. Answer with the number only."


async def solve(metadata: dict[str, int], tries: int = 2) -> str:
    """The sum of a and b, as the model says it. A reply without a number is asked about once more."""
    messages = [{"role": "user", "content": f"What is {metadata['a']}+{metadata['b']}? Answer with the number only."}]
    async with AsyncOpenAI() as client:  # the run sets OPENAI_BASE_URL and OPENAI_API_KEY
        for _ in range(tries):
            reply = await client.chat.completions.create(model="policy", messages=messages, max_tokens=16)
            text = reply.choices[0].message.content or ""
            found = re.search(r"\d+", text)
            if found:
                return found[0]
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": ASK_AGAIN}]
    return text
