"""The fixed prompts whose answers drafts are measured over: what heads are trained on, and what they will be asked.

Written for this purpose, and under the licence of this repository. Rates are compared over versions: do not edit them.
"""

from __future__ import annotations

PROMPTS = (
    "Explain to a child why the sky is blue.",
    "Write a short story about a lighthouse keeper and a storm.",
    "How do I make pancakes? Give me the recipe step by step.",
    "Write a Python function that returns the n-th Fibonacci number, and explain it.",
    "What are the advantages and disadvantages of working from home?",
    "Summarise the causes of the First World War in a few sentences.",
    "Give me five tips for learning a new language.",
    "A train travels 120 kilometres in 2 hours. How fast does it go? Show your reasoning.",
    "Write a polite email that asks a colleague to move a meeting to Friday.",
    "What is the difference between a virus and a bacterium?",
    "Describe the city of Rome for a tourist who has one day.",
    "How does a refrigerator work?",
    "Write a poem about autumn leaves.",
    "Explain what a hash table is and when to use one.",
    "Who was Isaac Newton, and what is he known for?",
    "Plan a healthy dinner for four people with a small budget.",
    "Write a SQL query that counts the orders of each customer, and explain it.",
    "What should I pack for a week of hiking in the mountains?",
    "Compare cats and dogs as pets.",
    "Why is sleep important? Name the main reasons.",
    "Write a product description for a wooden desk lamp.",
    "Anna has 15 apples, gives away 6 and buys 9. How many has she now? Explain each step.",
    "Explain the water cycle in simple words.",
    "Write a dialogue between a teacher and a student about homework.",
)
