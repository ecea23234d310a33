"""A file of requests, uploaded and worked off by a running server; `octavo run-batch -i IN -o OUT` needs no server."""

import io
import json
import os
import time

from openai import OpenAI

client = OpenAI(base_url=os.environ.get("OPENAI_BASE_URL", "http://localhost:8000/v1"), api_key="none")
model = client.models.list().data[0].id

ROUTE = "/v1/chat/completions"
lines = []
for country in ("France", "Italy", "Japan"):
    question = {"role": "user", "content": f"What is the capital of {country}?"}
    body = {"model": model, "messages": [question], "max_tokens": 24, "temperature": 0}
    lines.append(json.dumps({"custom_id": country, "method": "POST", "url": ROUTE, "body": body}))

file = client.files.create(file=("questions.jsonl", io.BytesIO("\n".join(lines).encode())), purpose="batch")
batch = client.batches.create(input_file_id=file.id, endpoint=ROUTE, completion_window="24h")
while batch.status not in ("completed", "failed", "expired", "cancelled"):
    time.sleep(0.2)
    batch = client.batches.retrieve(batch.id)
print(f"{batch.status}: {batch.request_counts.completed} of {batch.request_counts.total}")
for line in client.files.content(batch.output_file_id).text.splitlines():
    answer = json.loads(line)
    print(f"{answer['custom_id']}: {answer['response']['body']['choices'][0]['message']['content']}")
