"""What the embedded family can draw: emoji names by group, and background colours."""

from __future__ import annotations

_ANIMALS = """
monkey face, gorilla, orangutan, dog, poodle, wolf, fox, raccoon, cat, black cat, lion, tiger, leopard, moose, donkey,
horse, unicorn, zebra, deer, bison, cow, pig, boar, ram, goat, camel, llama, giraffe, elephant, mammoth, rhinoceros,
hippopotamus, mouse, hamster, rabbit, chipmunk, beaver, hedgehog, bat, bear, koala, polar bear, panda, sloth, otter,
skunk, kangaroo, badger, paw prints, turkey, rooster, hatching chick, bird, penguin, dove, eagle, duck, swan, owl,
dodo, feather, flamingo, peacock, parrot, phoenix, frog, crocodile, turtle, lizard, snake, dragon, sauropod, t-rex,
whale, spouting whale, dolphin, seal, fish, tropical fish, blowfish, shark, octopus, spiral shell, coral, jellyfish,
crab, lobster, shrimp, squid, snail, butterfly, bug, ant, honeybee, beetle, lady beetle, spider, scorpion, bouquet,
rose, sunflower, tulip, hibiscus, lotus, potted plant, evergreen tree, palm tree, cactus, maple leaf, mushroom
"""
_FOOD = """
grapes, melon, watermelon, tangerine, lemon, banana, pineapple, mango, red apple, green apple, pear, peach, cherries,
strawberry, blueberries, kiwi fruit, tomato, coconut, avocado, eggplant, carrot, ear of corn, hot pepper, bell pepper,
cucumber, broccoli, garlic, onion, bread, croissant, pretzel, bagel, pancakes, waffle, cheese wedge, bacon, hamburger,
french fries, pizza, hot dog, taco, popcorn, sushi, ice cream, doughnut, cookie, birthday cake, cupcake, lollipop,
honey pot, teapot, wine glass, beer mug
"""
_TRAVEL = """
compass, volcano, mount fuji, desert island, house, castle, tent, ferris wheel, locomotive, bus, ambulance,
fire engine, police car, taxi, automobile, tractor, racing car, motor scooter, bicycle, skateboard, stop sign, anchor,
ring buoy, sailboat, speedboat, ship, airplane, parachute, helicopter, satellite, rocket, flying saucer, luggage,
alarm clock, hourglass done, crescent moon, sun, ringed planet, star, tornado, rainbow, umbrella, high voltage,
snowflake, snowman, fire, droplet
"""
_ACTIVITIES = """
jack-o-lantern, christmas tree, balloon, party popper, wrapped gift, trophy, soccer ball, basketball,
american football, tennis, bowling, boxing glove, ice skate, bullseye, kite, crystal ball, video game, game die,
puzzle piece, teddy bear, artist palette, yarn
"""
_OBJECTS = """
sunglasses, necktie, t-shirt, jeans, dress, handbag, backpack, running shoe, crown, top hat, graduation cap, ring,
gem stone, bell, headphone, saxophone, trumpet, guitar, violin, drum, telephone, laptop, floppy disk, camera,
light bulb, books, scroll, money bag, envelope, pencil, scissors, key, hammer, axe, bomb, magnet, microscope, toolbox,
toothbrush, shopping cart
"""
_SMILEYS = "skull, ghost, alien, robot, broken heart"

NAMES: tuple[str, ...] = tuple(
    " ".join(name.split()) for group in (_ANIMALS, _FOOD, _TRAVEL, _ACTIVITIES, _OBJECTS, _SMILEYS) for name in group.split(",")
)
"""The emoji names in the order of the reference pictures; lower case, ASCII, at most four words."""

COLOURS: dict[str, tuple[int, int, int]] = {
    "white": (250, 250, 250),
    "red": (226, 92, 88),
    "orange": (244, 160, 80),
    "yellow": (250, 226, 108),
    "green": (120, 196, 120),
    "blue": (108, 160, 232),
    "purple": (158, 118, 208),
    "pink": (246, 174, 204),
    "gray": (156, 160, 166),
}
"""Background colours, sRGB 0-255; white is what a prompt without a colour gets."""

DEFAULT_COLOUR = "white"
MAX_WORDS = 8


def prompt_text(name: str, colour: str) -> str:
    """The prompt for a name on a background: "fox", "red apple on blue"."""
    return name if colour == DEFAULT_COLOUR else f"{name} on {colour}"


def word_table() -> list[str]:
    """All words of all prompts, sorted; word i has the id i + 1, 0 is the padding."""
    texts = [*NAMES, "on", *COLOURS]
    return sorted({word for text in texts for word in text.split()})


def word_ids(text: str, words: list[str]) -> list[int]:
    """A prompt as MAX_WORDS word ids, left-padded with 0."""
    ids = [words.index(word) + 1 for word in text.split()]
    return [0] * (MAX_WORDS - len(ids)) + ids
