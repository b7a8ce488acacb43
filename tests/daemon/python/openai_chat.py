"""Chats with a running server through the openai package: plain and streaming. Prints one JSON line per question."""
import json
import sys

import openai

base_url = sys.argv[1]
questions = json.load(sys.stdin)
client = openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=120)
model = client.models.list().data[0].id
for messages in questions:
    plain = client.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=128)
    stream = client.chat.completions.create(
        model=model, messages=messages, temperature=0, max_tokens=128, stream=True,
        stream_options={"include_usage": True},
    )
    pieces, usage, reason = [], None, None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            pieces.append(choice.delta.content or "")
            reason = choice.finish_reason or reason
    print(json.dumps({
        "version": openai.__version__,
        "plain": plain.choices[0].message.content,
        "plain_reason": plain.choices[0].finish_reason,
        "plain_usage": plain.usage.total_tokens,
        "streamed": "".join(pieces),
        "streamed_reason": reason,
        "streamed_usage": usage.total_tokens,
    }))
try:
    client.chat.completions.create(model="no-such-model", messages=[{"role": "user", "content": "x"}])
except openai.NotFoundError as error:
    print(json.dumps({"error": error.code}))
