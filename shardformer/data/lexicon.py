"""The words of the built-in corpus: fourteen speakers, each with things of their own, and what they all share."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Speaker:
    name: str
    title: str  # how the others address them
    oath: str
    verse: float  # how often they speak in couplets
    asking: float  # how often they end on a question
    things: tuple[str, ...]  # what they talk about more than others do


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _phrases(text: str) -> tuple[str, ...]:
    return tuple(phrase.strip() for phrase in text.split("|"))


def _speaker(name: str, title: str, oath: str, verse: float, asking: float, things: str) -> Speaker:
    return Speaker(name, title, oath, verse, asking, _words(things))


SPEAKERS = (
    _speaker("Marlow", "good miller", "by stone and sluice", 0.1, 0.3, "millstone sack sluice loaf grain barrow"),
    _speaker("Quilla", "wise clerk", "upon my inkwell", 0.2, 0.6, "ledger quill margin folio receipt inkwell"),
    _speaker("Xanthe", "dear lady", "by my mother's glass", 0.7, 0.3, "mirror ribbon fan locket slipper letter"),
    _speaker("Jory", "young sailor", "by salt and star", 0.3, 0.4, "anchor sail harbour compass oar jib capstan"),
    _speaker("Zebedee", "old priest", "as bells are blest", 0.5, 0.2, "chapel candle psalm steeple vow grave"),
    _speaker("Vesper", "sweet singer", "by lute and larynx", 0.9, 0.3, "lute ballad echo chorus string melody"),
    _speaker("Fenn", "brave captain", "on my sworn blade", 0.1, 0.4, "sword banner rampart trumpet helmet sentry gate"),
    _speaker("Odelia", "great queen", "by this cold crown", 0.5, 0.5, "crown sceptre treaty throne herald pardon"),
    _speaker("Hobbin", "merry fool", "by cap and custard", 0.6, 0.7, "bauble riddle pudding goose jest puppet onion"),
    _speaker("Tamsin", "kind nurse", "bless every cradle", 0.2, 0.5, "cradle kettle blanket poultice lullaby herb"),
    _speaker("Kestrel", "sly hunter", "by hawk and hollow", 0.2, 0.2, "arrow snare falcon thicket antler burrow"),
    _speaker("Ysolde", "grave widow", "as grief is long", 0.7, 0.4, "veil urn shadow portrait raven winter memory"),
    _speaker("Brannoc", "stout smith", "by hammer and heat", 0.1, 0.3, "anvil hammer furnace horseshoe rivet chain"),
    _speaker("Umber", "quiet painter", "by ochre and azure", 0.5, 0.4, "canvas easel pigment fresco brush palette"),
)

NOUNS = _words("""
    acorn altar apple ash baker bargain barrel basket beacon bee bird boat bonfire bottle bowl bracelet branch
    bridge brook brother butcher button cage camel candle carpet castle cave cellar chair cheese child chimney cloud
    coat coin comet cook cottage cousin cradle cricket crow cup curtain dagger dancer daughter doctor door dove
    dragon dream drum eagle elm emperor envelope fairy farmer feather fiddle field finger fire flag flower flute
    forest fountain fox friend frog furrow gale ghost giant glove goat gown guest harp harvest hawk hedge hermit
    hill hood horse hour house hunger icicle inn island jewel joiner judge juggler kennel key king kitchen kite knot
    ladder lamb lantern lark lawyer lemon lion lizard lord magpie maiden mantle map market marsh mask mast meadow
    meal merchant mirror mole monk moon mountain mule needle neighbour nest nettle nightingale nun oak oath orange
    orchard otter oven owl painter palace parrot path pear pebble pepper petal pigeon pilgrim pillow pine pirate
    plough plum poet pond poor-box porridge potion prayer prince promise quarrel quarry queen rabbit rat reed rival
    river road robe robin rooster rose rumour saddle sailor sandal sapling scarf scholar secret sermon servant shell
    shepherd ship shoemaker sister sleeve soldier son song sparrow spell spider squirrel stable star statue storm
    stranger stream summer swallow swan table tailor tapestry tavern temple thief thimble thistle tiger toad torch
    tower traveller treasure tree trout turnip twig uncle valley vase village vine violin voyage vulture wagon wall
    walnut wasp weaver well whale wheel whisper window wine wish witch wizard wolf wound wren zealot zebra
""")

ADJECTIVES = _words("""
    absent amber ancient awkward bare barren bitter blind blue blunt bold bright brisk broken brown calm careless
    clever cold common crimson crooked cruel curious damp dark deaf dear dull dusty eager earnest elegant empty
    exact faint fair faithful false famous fatal fierce flat fond foolish forgotten fragile frail fresh frosty
    frozen gentle giddy glad gloomy golden greedy green grey grim guilty handsome happy heavy hidden hollow holy
    honest humble hungry icy idle innocent ivory jealous jolly keen kindly lame lawful lazy lean little lonely lost
    loud lucky mad meek merciful mild modest muddy naked narrow nimble noble numb odd painted pale patient perfect
    pious plain polite precious pretty private proud quaint quick quiet ragged rare raw red restless rich ripe
    rotten rough royal rusty sacred sad savage scarlet secret secure selfish serious sharp shy silent silver simple
    sleepy small smooth sober solemn sour stale steady stiff stormy strange stubborn sudden sullen swift tame
    tangled tender thin thirsty timid tired tragic ugly useful vain vast velvet vexed vivid warm weak wealthy weary
    wet white wicked wild wise wooden worthy yellow young zealous
""")

# (plain, third person, past)
VERBS = tuple(
    tuple(forms.split("/"))
    for forms in _words("""
    admire/admires/admired answer/answers/answered ask/asks/asked bake/bakes/baked bite/bites/bit
    bless/blesses/blessed borrow/borrows/borrowed break/breaks/broke bring/brings/brought build/builds/built
    burn/burns/burned bury/buries/buried buy/buys/bought call/calls/called carry/carries/carried
    catch/catches/caught chase/chases/chased choose/chooses/chose claim/claims/claimed clean/cleans/cleaned
    count/counts/counted cross/crosses/crossed crush/crushes/crushed curse/curses/cursed dig/digs/dug
    doubt/doubts/doubted drag/drags/dragged draw/draws/drew dread/dreads/dreaded drown/drowns/drowned eat/eats/ate
    envy/envies/envied fear/fears/feared fetch/fetches/fetched fight/fights/fought find/finds/found
    flatter/flatters/flattered fold/folds/folded follow/follows/followed forget/forgets/forgot
    forgive/forgives/forgave free/frees/freed gather/gathers/gathered grasp/grasps/grasped greet/greets/greeted
    guard/guards/guarded harm/harms/harmed hate/hates/hated hear/hears/heard hide/hides/hid hire/hires/hired
    hold/holds/held honour/honours/honoured hunt/hunts/hunted inspect/inspects/inspected join/joins/joined
    judge/judges/judged keep/keeps/kept kick/kicks/kicked kiss/kisses/kissed know/knows/knew learn/learns/learned
    lift/lifts/lifted lose/loses/lost love/loves/loved measure/measures/measured mend/mends/mended
    miss/misses/missed mock/mocks/mocked name/names/named need/needs/needed obey/obeys/obeyed
    offend/offends/offended open/opens/opened paint/paints/painted pity/pities/pitied polish/polishes/polished
    praise/praises/praised pull/pulls/pulled push/pushes/pushed question/questions/questioned quit/quits/quitted
    remember/remembers/remembered rescue/rescues/rescued rob/robs/robbed ruin/ruins/ruined scorn/scorns/scorned
    see/sees/saw seek/seeks/sought sell/sells/sold serve/serves/served shake/shakes/shook shame/shames/shamed
    spare/spares/spared spoil/spoils/spoiled steal/steals/stole strike/strikes/struck sweep/sweeps/swept
    taste/tastes/tasted teach/teaches/taught tempt/tempts/tempted throw/throws/threw touch/touches/touched
    trade/trades/traded trust/trusts/trusted vex/vexes/vexed visit/visits/visited wake/wakes/woke want/wants/wanted
    warn/warns/warned wash/washes/washed watch/watches/watched weigh/weighs/weighed welcome/welcomes/welcomed
    win/wins/won write/writes/wrote
""")
)

# Nouns that end alike, so that the first line of a couplet tells how the second may end.
RHYMES = tuple(
    _words(rhyme)
    for rhyme in _phrases("""
    night light sight flight delight knight spite height | day way play spray clay decay bay ray
    | heart part art start dart cart chart | stone bone throne moan loan tone zone
    | sea plea tree key decree knee bee | rain pain chain lane grain plain crane
    | hand land stand sand band command demand | fire desire lyre choir briar liar wire
    | gold cold hold fold scold mould | breath death | sky lie sigh reply eye goodbye
    | door floor shore roar store war oar | song wrong throng gong thong | moon tune noon June ruin boon spoon
    | tear fear year deer spear pier | deep sleep keep sheep heap leap
""")
)

# The start of a verse line, which a rhyming noun ends: {a} is an adjective, {n} a noun, {ns} its plural, {v} a verb.
VERSE_OPENINGS = _phrases("""
    The {a} {n} will {v} the | No {n} of mine can {v} the | My {a} {n} and all its | What {a} {n} shall fear the
    | I gave the {n} my only | The {n} was {a}, and so the | When {a} {ns} have lost their
    | Go, tell the {n} about the | There is no {n} without the | O {a} {n}, O {a}
    | He that would {v} one {n} loves the | So let the {n} forget the | This {n} may {v}, but not the
    | I heard the {a} {n} and the | She left her {n} beside the | Come, {a} {n}, and end the
""")

PROVERBS = _phrases("""
    a borrowed candle burns at both ends | who counts the crows will miss the corn
    | the well remembers every bucket | no lock was ever fond of a key | trust the bridge, but learn to swim
    | the moon pays no rent to the river | an honest fool is half a sage | even a short road has two ends
    | he who sells the wind must buy the storm | a quiet dog has read the law
    | let the bread tell the baker's story | what the tide takes, the tide will tell
    | a crown is only a hat that quarrels | the last guest sweeps the floor
    | ask the thief what the lock is worth | old soup, new spoon, same hunger
    | the mill does not grind yesterday | snow is the rich man of one morning
    | one lantern is a crowd in the dark | never argue with an open window
""")

REFRAINS = _phrases("""
    Sing hey, the willow and the water-wheel, | Ring round, ring low, the bell below the sea,
    | O turn again, my lantern and my lad, | Down, down the valley where the barley grows,
    | The fox is in the orchard, ho, the fox, | Lie soft, lie still, the winter has no door,
    | Three ships, three ships, and not a sail for me, | Blow, piper, blow, and never mind the moon,
""")

PLACES = _phrases("""
    the mill by the river | the harbour at low tide | the palace, a great hall | the chapel at midnight
    | a road near the border | the forge behind the market | the queen's garden | a tavern with one window
    | the forest, under an oak | the widow's house | the ramparts before dawn | a meadow after rain
    | the painter's attic | the prison beneath the tower
""")

HIDING_PLACES = _phrases("""
    behind the chapel door | beneath the seventh stair | under the miller's floor | inside the broken clock
    | below the frozen well | among the captain's boots | over the kitchen fire | within the hollow oak
    | beside the harbour wall | between two loaves of bread | against the garden gate | upon the highest shelf
""")

TIMES = _phrases("""
    tonight | tomorrow | before the bell | at break of day | when the tide turns | within the hour
    | after the feast | by candlelight | ere winter ends | on market day
""")

NUMBERS = _words("two three four five six seven eight nine ten eleven twelve twenty")

OPENINGS = _phrases("""
    Peace | Alas | Hark | Come | Nay | Well | Marry | Enough | Softly | In truth | Believe me | I pray you
    | Good news | No more
""")

ENTRANCES = _phrases("""
    with a lantern | in haste | laughing | weeping | in disguise | with a letter | singing | armed
    | asleep on a cart
""")

GESTURES = _phrases("""
    Aside | Kneeling | Reading | Drawing a knife | Weeping | Laughing | To the audience | Pointing at the window
""")

# Coined anew each time from two halves: an owl-hearted guest, the bridge of Thornwick.
EPITHETS = _words("""
    bellied browed eyed faced fisted footed handed headed hearted kneed nosed tongued toothed witted
""")
VILLAGES = (
    _words("""
    Alder Barrow Bram Cold Crow Dun East Elder Fair Fallow Glen Grim Hazel Heron Hollow Iron King Lamb Lark Long
    Marsh Mill Moor Nether North Oxen Plum Quarry Raven Rush Saxon Silver South Stone Swan Thorn Upper Violet Wex
    Yew
"""),
    _words("""
    bourne bridge brook bury by combe cross dale fell field ford gate ham hurst leigh mere mouth stead wick wood
"""),
)
