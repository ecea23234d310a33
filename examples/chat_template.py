"""A chat template of one's own: what the model reads of a conversation.

It is Jinja, as in a model's tokenizer_config.json. Servers take one for all requests, octavo serve MODEL
--chat-template FILE.jinja; variables of a request are in its body, as "chat_template_kwargs".
"""

from octavo import LLM, SamplingParams

TEMPLATE = """\
<|im_start|>system
You are a guide. {{ manner | default('Be kind.') }}<|im_end|>
{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]

if __name__ == "__main__":
    llm = LLM(max_model_len=512)
    params = SamplingParams(temperature=0, max_tokens=24)
    for template, variables in ((None, None), (TEMPLATE, None), (TEMPLATE, {"manner": "Answer in one word."})):
        [output] = llm.chat(
            MESSAGES, params, use_tqdm=False, chat_template=template, chat_template_kwargs=variables
        )  # fmt: skip
        print(output.prompt)
        print(f"--> {output.outputs[0].text}\n")
