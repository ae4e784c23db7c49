"""The fixed text of which the check stage measures the perplexity, in the registers that models are asked for.

Written for this purpose, and under the licence of this repository. Numbers are compared over versions: do not edit it.
"""

from __future__ import annotations

PROSE = """\
The lighthouse had been empty for eleven years when Marta bought it. The roof leaked over the staircase, and the \
lamp room smelled of salt and old rope. Her brother said that nobody in her right mind would pay for a tower without \
a road, and he was right about the road. In the first winter she carried everything up the cliff path on her back: \
flour, nails, a stove in four pieces, and finally a piano that she had bought from a school and taken apart in the \
harbour.

By spring the neighbours had stopped laughing. A light burned behind the windows every evening, and when the fog \
came in thick from the north, the fishermen noticed that somebody was ringing the bell again. She never told them \
that she did it mostly for herself. The sound went out over the water, came back a little later from the island, and \
for a moment it seemed to her that the house and the sea were talking about something they had both known for a long \
time.
"""

EXPLANATION = """\
Why do the leaves of many trees turn red and yellow in autumn? During the summer a leaf is full of chlorophyll, the \
green pigment that takes up sunlight and helps the plant to make sugar from water and carbon dioxide. Chlorophyll \
breaks down all the time, and the tree has to replace it. When the days become shorter and the nights colder, the \
tree stops doing so. It draws nutrients such as nitrogen back into the branches and the trunk, and the green colour \
fades. Yellow and orange pigments, which were there all along, become visible. Red is different: in some species it \
is produced only in autumn, when sugar is trapped in the leaf. Scientists still discuss what it is good for. One \
idea is that it protects the leaf from too much light while the last nutrients are being moved; another is that it \
warns insects.
"""

DIALOGUE = """\
"You're late," said the clerk, without looking up.

"The train was late," said Tom. "I was on time for it."

"Name?"

"Thomas Reed. I have an appointment at ten. About the dog."

She turned two pages, then one back. "It says here that it's a cat."

"It's a dog. A brown one, with a white ear. He's been missing since Tuesday."

"We have a brown cat with a white ear," she said. "It was found on Tuesday, on Mill Street. It bites."

Tom thought about it. "Does it come when you call it Biscuit?"

"Sir, it's a cat. It doesn't come when you call it anything."

"May I see it anyway?"

She sighed, took a bunch of keys from the hook behind her, and stood up. "Follow me, please. And if it is your dog, \
I don't want to hear about it."
"""

CODE = '''\
from collections import Counter


def most_common_words(path, limit=10):
    """Return the most common words of a text file, with their counts."""
    counts = Counter()
    with open(path, encoding="utf-8") as file:
        for line in file:
            words = line.lower().split()
            counts.update(word.strip(".,;:!?") for word in words)
    return counts.most_common(limit)


class Account:
    def __init__(self, owner, balance=0):
        self.owner = owner
        self.balance = balance

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        self.balance += amount
        return self.balance

    def withdraw(self, amount):
        if amount > self.balance:
            raise ValueError("not enough money")
        self.balance -= amount
        return self.balance


if __name__ == "__main__":
    for word, count in most_common_words("input.txt"):
        print(f"{word}: {count}")
'''

NUMBERS = """\
| city | 2019 | 2020 | 2021 |
| --- | --- | --- | --- |
| Northport | 12,400 | 11,850 | 12,960 |
| Ashford | 8,100 | 7,900 | 8,350 |
| Total | 20,500 | 19,750 | 21,310 |

In 2020 both cities had fewer visitors than in 2019: 550 fewer in Northport and 200 fewer in Ashford, together 750. \
In 2021 Northport gained 1,110 visitors and Ashford 450, so that the total rose by 1,560, from 19,750 to 21,310.

A ticket costs 12 dollars and a guide costs 30 dollars. For a group of 5 people the price is 5 * 12 + 30 = 60 + 30 = \
90 dollars, which is 90 / 5 = 18 dollars each.

{"name": "Northport", "country": "Canada", "visitors": {"2020": 11850, "2021": 12960}, "open": true}
"""

PASSAGES = (PROSE, EXPLANATION, DIALOGUE, CODE, NUMBERS)
"""Each is a text of its own to the model."""
