"""Stage 1: the texts of the demo voice, and a folder of configs and tokenizer that fixes every size of the model.

The sentences are the usage examples of WordNet (Debian's ``wordnet-base``) and sentences made here from patterns, so
that greetings, numbers and times are well known. The test sentences are in none of them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from trt_cpspec.builder.synthetic import CodecSize, DecoderSize, SyntheticSpec, write_checkpoint

from trt_cpspec.text import TextTokenizer

SPEAKER = "demo"
CODEBOOK = 256
WORDNET = Path("/usr/share/wordnet")

TEST_SENTENCES = (
    "Good evening and welcome to the show.",
    "What time does the next bus leave?",
    "I left my keys on the kitchen table.",
    "The river is very deep near the old bridge.",
    "She wrote a long letter to her sister.",
    "We are going to the market this morning.",
    "Could you help me carry these boxes?",
    "The doctor will see you in a few minutes.",
    "He forgot to lock the front door.",
    "There is a small shop on the corner.",
    "My father works in a large hospital.",
    "It will be cold and windy tonight.",
    "The students finished the test early.",
    "Do you know the name of that song?",
    "Our flight was delayed for three hours.",
    "The cat is sleeping under the chair.",
    "I have never seen so many stars.",
    "They built a new house by the lake.",
    "Please turn down the music.",
    "The price of bread went up again.",
    "You should drink more water every day.",
    "The old man told us a strange story.",
    "We need two more people for the game.",
    "The phone rang in the middle of the night.",
    "Her answer surprised the whole class.",
    "This road leads straight to the sea.",
    "I will send you the report tomorrow.",
    "The baby began to cry when the lights went out.",
    "He speaks three languages very well.",
    "The garden looks beautiful in the spring.",
    "Nobody could open the heavy door.",
    "I think we should talk about the plan.",
    "The police found the money in a blue car.",
    "Many birds fly south in the winter.",
    "She bought a red dress for the party.",
    "Let us stop here and eat some lunch.",
    "The teacher asked a difficult question.",
    "Your room is on the second floor.",
    "I can not remember where I put my glasses.",
    "The soup needs a little more salt.",
    "A young woman was waiting at the station.",
    "The computer has to be repaired.",
    "We watched a movie about the war.",
    "The farmer sold all of his horses.",
    "Most of the shops are closed on Sunday.",
    "He ran as fast as he could.",
    "The water in the pool is warm.",
    "My mother makes the best apple pie.",
    "They decided to stay another week.",
    "Thank you for calling, and have a nice day.",
)
"""What the recogniser hears: short, plain, unseen in training, written before the first model was trained."""

_COMMON = """
Hello there. Hello. Hi. Good morning. Good afternoon. Good evening. Good night. Goodbye. See you soon. See you later.
Thank you. Thank you very much. You are welcome. Yes, please. No, thank you. Excuse me. I am sorry. How are you?
How are you today? I am fine, thank you. Nice to meet you. What is your name? My name is Ada. Where are you from?
Welcome. Welcome back. Welcome to the demo. Hello, world. Hello there, this is a short test. This is a short test.
This is a test. This is only a test. Testing, one, two, three. One, two, three. One, two, three, four, five.
Now say this. Say this one. Say more. Speak up, please. Please speak slowly. Can you hear me? I can hear you.
Hello there, how are you today? I am a small voice. I was trained on synthetic speech. I am a computer.
This voice is very small. This is a demo of a small voice. The codes are identical. Please wait. Please try again.
Something went wrong. That is right. That is wrong. I do not know. I do not understand. Are you ready? I am ready.
Let us begin. Let us go. Stop. Go. Yes. No. Maybe. Of course. Sure. All right. Not yet. Come in. Come here.
Look at this. The quick brown fox jumps over the lazy dog. To be or not to be, that is the question. Once upon a time.
She sells sea shells by the sea shore. A short sentence. Another sentence. This is another sentence. One more time.
Once more, please. Read this aloud. Read this text, please. Speak this sentence. I speak one sentence at a time.
Your assistant is ready. I am your assistant. The user asked a question. What can I do for you? How can I help you?
The weather is nice today. It is raining. It is snowing. The sun is shining. What time is it? What day is it today?
Happy birthday. Happy new year. Merry Christmas. Good luck. Well done. Congratulations. Take care. Be careful.
Draft, verify, and accept. Speculative decoding is exact. The model speaks. The audio is ready. The test has passed.
"""

_NAMES = (
    "Anna Bob Carl Diana Emma Frank George Helen Ivan Jack Kate Linda Mary Nick Oliver Peter Rose Sam Tom Victor Alice "
    "Ben Clara David Eve Grace Henry Jane John Laura Mark Nora Paul Sarah Susan Walter"
).split()
_PLACES = (
    "London Paris Berlin Rome Madrid Boston Chicago Dublin Vienna Tokyo Moscow Athens Cairo Oslo Sydney Toronto Texas "
    "Kansas Denver Dallas Seattle Atlanta Houston Geneva Prague Lisbon Warsaw Milan"
).split()
_DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
_MONTHS = "January February March April May June July August September October November December".split()
_THINGS = (
    "book,car,house,table,chair,window,door,phone,computer,letter,picture,ticket,bag,box,cup,glass,clock,watch,key,"
    "lamp,map,pen,radio,ring,road,room,shirt,shoe,song,street,train,tree,bus,boat,bird,cat,dog,horse,garden,river,"
    "hat,coat,knife,spoon,plate,bed,wall,floor,bridge,school,church,shop,bank,farm,field,hill,lake,island,story,game"
).split(",")
_QUALITIES = (
    "big,small,new,old,red,blue,green,yellow,black,white,good,bad,long,short,hot,cold,warm,clean,dirty,fast,slow,cheap,"
    "expensive,beautiful,strange,heavy,light,soft,hard,dark,bright,quiet,loud,empty,full,famous,simple,little,large"
).split(",")
_DEEDS = (
    "open the window,close the door,call the doctor,read the newspaper,write a letter,buy some bread,cook the dinner,"
    "wash the dishes,feed the cat,walk the dog,play the piano,sing a song,take the bus,catch the train,pay the bill,"
    "clean the kitchen,watch television,learn English,visit a friend,go to bed,wait for the bus,drink some water,"
    "find the key,move the table,turn on the light,turn off the radio,answer the phone,ask a question,sell the house,"
    "start the engine,stop the car,plant a tree,paint the wall,fix the clock,book a room,send a message,eat an apple"
).split(",")
_PEOPLE = (
    "my mother,my father,my brother,my sister,the teacher,the doctor,the driver,the child,the old man,the young woman,"
    "our neighbor,the king,the captain,the boy,the girl,his friend,her husband,the student,the nurse,the farmer"
).split(",")
_PATTERNS = (
    "Hello {name}.", "Hello {name}, how are you?", "Good morning, {name}.", "Thank you, {name}.", "My name is {name}.",
    "Goodbye, {name}.", "{name} lives in {place}.", "{name} is from {place}.", "I live in {place}.",
    "The train to {place} leaves at {hour}.", "The flight from {place} arrives at {hour}.",
    "{name} and {name2} are here.",
    "It is {hour} o'clock.", "It is {clock}.", "The meeting is at {clock}.", "We meet on {day} at {hour}.",
    "I will see you on {day}.", "The shop is closed on {day}.", "Today is {day}.", "Today is {day}, {month} {date}.",
    "His birthday is in {month}.", "The year was {year}.", "She was born in {year}.", "That costs {number} dollars.",
    "The answer is {number}.", "I have {number} of them.", "There are {number} people in the room.",
    "It is {number} degrees outside.", "Please wait {number} minutes.", "My number is {digits}.",
    "Room number {number}.",
    "{number} plus {number2} is a sum.", "He is {number} years old.", "About {number} percent of them agreed.",
    "The {quality} {thing}.", "This is a {quality} {thing}.", "Where is the {quality} {thing}?",
    "I like the {quality} {thing}.", "The {thing} is {quality}.", "Is the {thing} {quality} or {quality2}?",
    "The {quality} {thing} is behind the {quality2} {thing2}.", "There is a {thing} near the {thing2}.",
    "She put the {thing} next to the {thing2}.", "Do you see the {quality} {thing} over there?",
    "{Person} wants to {deed}.", "{Person} forgot to {deed}.", "Please {deed}.", "Could you please {deed}?",
    "I have to {deed} and {deed2}.", "Do not {deed} now.", "{Person} will {deed} on {day}.",
    "Did {person} {deed}?", "Tell {person} to {deed}.", "{Person} has a {quality} {thing}.",
    "{Person} gave the {thing} to {person2}.", "{Person} saw {person2} in {place}.", "When will {person} {deed}?",
    "If it rains, {person} will {deed}.", "Yesterday {person} found a {quality} {thing}.",
    "{name} bought {number} {quality} books.", "I think that {name} can {deed}.", "We should {deed}, {name}.",
)  # fmt: skip

_FINE = re.compile(r"[A-Za-z][A-Za-z0-9 ,.'?!:;-]*[A-Za-z0-9.?!]")
_SHOUTED = re.compile(r"[A-Z]{2}|[A-Z]\.|\d{5}")


@dataclass(frozen=True, slots=True, kw_only=True)
class VoiceSpec(SyntheticSpec):
    """The sizes of the demo voice. Its tokenizer knows letters: of all words only those of the template are a token."""

    @property
    def words(self) -> tuple[str, ...]:
        return ("assistant", "user")


def voice_spec() -> VoiceSpec:
    """Return the sizes: with all weights in FP16 a checkpoint of less than 12 MB."""
    return VoiceSpec(
        talker=DecoderSize(hidden=192, intermediate=512, layers=5, heads=6, kv_heads=3, head_dim=32),
        code_predictor=DecoderSize(hidden=128, intermediate=320, layers=3, heads=4, kv_heads=2, head_dim=32),
        codec=CodecSize(
            decoder_dim=192, latent_dim=96, codebook_dim=64, hidden=96, intermediate=256, layers=3, heads=3,
            head_dim=32, sliding_window=24,
        ),
        text_hidden=192, text_vocab=288, codebook_size=CODEBOOK, dtype="F16",
    )  # fmt: skip


def write_skeleton(folder: Path, spec: VoiceSpec) -> None:
    """Write the checkpoint folder without its weights; the configs are what every later stage reads its sizes from."""
    shutil.rmtree(folder, ignore_errors=True)
    write_checkpoint(folder, spec)
    for path in (folder / "model.safetensors", folder / "speech_tokenizer" / "model.safetensors"):
        path.unlink()
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    talker = config["talker_config"]
    talker["spk_id"] = {SPEAKER: talker["spk_id"]["vivian"]}
    talker["spk_is_dialect"] = {SPEAKER: False}
    talker["codec_language_id"] = {"english": talker["codec_language_id"]["english"]}
    # Utterances of a few seconds: angles that turn within them.
    talker["rope_theta"] = talker["code_predictor_config"]["rope_theta"] = 10000
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    path = folder / "generation_config.json"
    generation = json.loads(path.read_text(encoding="utf-8"))
    # A codebook of 256: a code may well come again, and is not punished for it. Of the Talker's temperatures tried on
    # development texts 0.15 has the fewest errors. The CodePredictor's is that of the draws the decoder was trained on
    # along: 0.3 has one error of 364 words less, 0.9 more of them.
    generation |= {"repetition_penalty": 1.0, "temperature": 0.15, "subtalker_temperature": 0.6}
    path.write_text(json.dumps(generation, indent=2) + "\n", encoding="utf-8")


def pattern_sentences(random_: random.Random, count: int) -> Iterator[str]:
    """Yield sentences made of the patterns."""
    for _ in range(count):
        pattern = random_.choice(_PATTERNS)
        person, person2 = random_.sample(_PEOPLE, 2)
        name, name2 = random_.sample(_NAMES, 2)
        thing, thing2 = random_.sample(_THINGS, 2)
        quality, quality2 = random_.sample(_QUALITIES, 2)
        deed, deed2 = random_.sample(_DEEDS, 2)
        text = pattern.format(
            name=name, name2=name2, person=person, person2=person2, Person=person[0].upper() + person[1:], thing=thing,
            thing2=thing2, quality=quality, quality2=quality2, deed=deed, deed2=deed2, place=random_.choice(_PLACES),
            day=random_.choice(_DAYS), month=random_.choice(_MONTHS), date=random_.randint(1, 31),
            hour=random_.randint(1, 12), clock=f"{random_.randint(1, 12)}:{random_.randint(10, 59)}",
            year=random_.randint(1800, 2030), number=random_.choice((random_.randint(0, 20), random_.randint(20, 999))),
            number2=random_.randint(0, 99), digits=" ".join(str(random_.randint(0, 9)) for _ in range(5)),
        )  # fmt: skip
        yield re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", text)


def wordnet_sentences(folder: Path) -> Iterator[str]:
    """Yield the usage examples of WordNet as sentences: a capital in front, a full stop behind."""
    for part in ("verb", "adj", "adv", "noun"):
        for line in (folder / f"data.{part}").read_text(encoding="latin-1").splitlines():
            for example in re.findall(r'"([^"]+)"', line.partition("|")[2]):
                text = " ".join(example.replace("`", "'").split())
                if text and text[-1].isalnum():
                    text += "."
                yield text[:1].upper() + text[1:]


def usable(text: str) -> bool:
    """Whether a sentence is plain and short enough: 2 to 72 characters of letters, figures and common signs."""
    return 2 <= len(text) <= 72 and _FINE.fullmatch(text) is not None and not _SHOUTED.search(text)


def gather(wordnet: Path, count: int, seed: int) -> list[str]:
    """Return distinct training sentences in random order: every common one, patterns (a third), and WordNet's."""
    random_ = random.Random(seed)
    common = [text.strip() for text in re.findall(r"[^.?!]+[.?!]", _COMMON.replace("\n", " "))]
    test = {_bare(text) for text in TEST_SENTENCES}
    examples = [text for text in wordnet_sentences(wordnet) if usable(text) and len(text) >= 12]
    random_.shuffle(examples)
    patterns = filter(usable, pattern_sentences(random_, count // 3))
    chosen = dict.fromkeys(text for text in itertools.chain(common, patterns, examples) if _bare(text) not in test)
    texts = list(itertools.islice(chosen, count))
    random_.shuffle(texts)
    return texts


def _bare(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


def folded_ids(folder: Path) -> np.ndarray:
    """Return for each text id the one whose embedding it shares: a capital letter's is the small one's, ``[n] i64``."""
    vocabulary: dict[str, int] = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
    size = json.loads((folder / "config.json").read_text(encoding="utf-8"))["talker_config"]["text_vocab_size"]
    fold = np.arange(size)
    for token, number in vocabulary.items():
        if len(token) == 1 and token.isascii() and token.isupper():
            fold[number] = vocabulary[token.lower()]
    return fold


def write_corpus(work: Path, texts: list[str], dev: int) -> None:
    """Tokenize the texts and write ``corpus.json`` and ``corpus.npz``; the last ``dev`` ones and the test are held out.

    ``corpus.npz`` has ``tokens`` (all texts one after the other), ``starts`` (for each token its first character),
    ``lengths`` (tokens of a text) and ``fold``.
    """
    tokenizer = TextTokenizer.from_dir(work / "skeleton")
    tokens, starts, lengths = [], [], []
    for text in [*texts, *TEST_SENTENCES]:
        ids = tokenizer.text_ids(text)
        places = np.cumsum([0, *(len(tokenizer_piece) for tokenizer_piece in pieces(work / "skeleton", ids))])
        if places[-1] != len(text):
            raise ValueError(f"{text!r} is not plain ASCII")
        tokens += ids
        starts += places[:-1].tolist()
        lengths.append(len(ids))
    np.savez_compressed(
        work / "corpus.npz", tokens=np.array(tokens, np.int16), starts=np.array(starts, np.int16),
        lengths=np.array(lengths, np.int16), fold=folded_ids(work / "skeleton"),
    )  # fmt: skip
    sets = {"train": texts[:-dev], "dev": texts[-dev:], "test": list(TEST_SENTENCES)}
    (work / "corpus.json").write_text(json.dumps(sets, indent=0) + "\n", encoding="utf-8")


_PIECES: dict[Path, dict[int, str]] = {}


def pieces(folder: Path, ids: list[int]) -> list[str]:
    """Return the characters behind each id."""
    if folder not in _PIECES:
        vocabulary = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
        _PIECES[folder] = {number: token for token, number in vocabulary.items()}
    return [_PIECES[folder][number] for number in ids]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder of all stages")
    parser.add_argument("--wordnet", type=Path, default=WORDNET, help="folder of WordNet's data files")
    parser.add_argument("--count", type=int, default=24000, help="training sentences, those for development included")
    parser.add_argument("--dev", type=int, default=200, help="of them held out")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    write_skeleton(args.work / "skeleton", voice_spec())
    texts = gather(args.wordnet, args.count, args.seed)
    write_corpus(args.work, texts, args.dev)
    letters = sum(map(len, texts))
    print(f"{len(texts)} sentences, {letters} characters, {args.dev} of them and {len(TEST_SENTENCES)} more held out")


if __name__ == "__main__":
    main()
