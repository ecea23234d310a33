"""Texts as vectors, and the one that is nearest to a question.

Any decoder can be asked for vectors, the default model too; a model that was trained for it is better:
LLM(model="BAAI/bge-small-en-v1.5"). Over HTTP it is POST /v1/embeddings of `octavo serve MODEL --runner pooling`.
"""

from octavo import LLM

DOCUMENTS = (
    "The Eiffel Tower was built in Paris in 1889.",
    "Bread is made of flour, water, salt and yeast.",
    "A cat sleeps for most of the day.",
)
QUESTION = "Bread is baked of flour, water and salt."


def cosine(a: list[float], b: list[float]) -> float:
    norm = sum(x * x for x in a) * sum(y * y for y in b)
    return sum(x * y for x, y in zip(a, b, strict=True)) / norm**0.5


if __name__ == "__main__":
    llm = LLM(runner="pooling", max_model_len=512)
    question, *documents = (output.outputs.embedding for output in llm.embed([QUESTION, *DOCUMENTS]))
    ranked = sorted(zip((cosine(question, vector) for vector in documents), DOCUMENTS, strict=True), reverse=True)
    for similarity, document in ranked:
        print(f"{similarity:.3f} {document}")
