"""An agent without any dependency on Plasmid: it calls the model through OpenAI's client and checks the reply."""

import re

from openai import AsyncOpenAI

ASK_AGAIN = "That is no number. Answer with the number only."


async def solve(metadata: dict[str, int], tries: int = 2) -> str:
    """Return the model's answer for the sum of a and b. A reply without a number is requested once more."""
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
