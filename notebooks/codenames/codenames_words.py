"""The words of the game: 24 themes of ten common words each. No word stands under two themes."""

from __future__ import annotations

THEMES: dict[str, tuple[str, ...]] = {
    "animal": ("lion", "horse", "rabbit", "monkey", "goat", "tiger", "sheep", "wolf", "camel", "fox"),
    "bird": ("eagle", "owl", "duck", "parrot", "crow", "goose", "swan", "robin", "pigeon", "hawk"),
    "fruit": ("apple", "banana", "cherry", "lemon", "grape", "peach", "plum", "mango", "melon", "fig"),
    "vegetable": ("carrot", "onion", "potato", "cabbage", "spinach", "pumpkin", "bean", "garlic", "celery", "beet"),
    "drink": ("coffee", "tea", "milk", "wine", "beer", "juice", "cocoa", "cider", "lemonade", "soda"),
    "body": ("hand", "foot", "knee", "elbow", "shoulder", "nose", "ear", "tooth", "neck", "finger"),
    "clothes": ("shirt", "coat", "sock", "hat", "glove", "scarf", "skirt", "jacket", "belt", "dress"),
    "colour": ("red", "blue", "green", "yellow", "purple", "brown", "black", "white", "grey", "pink"),
    "weather": ("rain", "snow", "storm", "fog", "wind", "thunder", "hail", "cloud", "frost", "sunshine"),
    "music": ("piano", "guitar", "violin", "drum", "flute", "trumpet", "harp", "song", "choir", "opera"),
    "sport": ("tennis", "football", "hockey", "golf", "rugby", "boxing", "cricket", "skiing", "rowing", "judo"),
    "tool": ("hammer", "saw", "drill", "wrench", "shovel", "axe", "rake", "chisel", "pliers", "screwdriver"),
    "kitchen": ("oven", "fork", "spoon", "kettle", "plate", "pan", "bowl", "stove", "fridge", "mug"),
    "furniture": ("table", "chair", "sofa", "bed", "desk", "shelf", "wardrobe", "bench", "stool", "cupboard"),
    "vehicle": ("car", "bus", "train", "truck", "bicycle", "tractor", "van", "tram", "motorcycle", "taxi"),
    "ship": ("boat", "ferry", "canoe", "yacht", "raft", "anchor", "sail", "captain", "harbour", "submarine"),
    "job": ("doctor", "teacher", "farmer", "baker", "lawyer", "nurse", "plumber", "pilot", "soldier", "judge"),
    "school": ("pencil", "book", "lesson", "exam", "student", "library", "homework", "chalk", "essay", "ruler"),
    "family": ("mother", "father", "sister", "brother", "uncle", "aunt", "cousin", "daughter", "son", "grandma"),
    "country": ("France", "Japan", "Brazil", "Egypt", "Canada", "India", "Spain", "Kenya", "Mexico", "Norway"),
    "space": ("moon", "star", "planet", "rocket", "comet", "galaxy", "orbit", "astronaut", "telescope", "meteor"),
    "metal": ("iron", "gold", "silver", "copper", "steel", "tin", "lead", "zinc", "bronze", "nickel"),
    "plant": ("tree", "rose", "grass", "tulip", "oak", "ivy", "daisy", "moss", "fern", "cactus"),
    "money": ("bank", "coin", "loan", "tax", "wallet", "price", "debt", "salary", "dollar", "cash"),
}

WORDS: tuple[str, ...] = tuple(word for words in THEMES.values() for word in words)
