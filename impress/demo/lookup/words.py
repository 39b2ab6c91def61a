"""The closed vocabulary of the lookup tasks: every word has exactly one role."""

from __future__ import annotations

from typing import Final


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


#: Markers that are not words of a document's sentences.
PAD: Final = "<pad>"
START: Final = "<s>"

#: Words that give facts, questions and answers their shape.
GRAMMAR: Final = _words("claim for yes no then after choose or mostly")

NAMES: Final = _words(
    """
    anna boris clara david edith felix greta hugo irene jonas karin leo maria nils olga paul
    rosa simon tessa ulrich vera walter xenia yusuf zelda amir bella cyrus dora emil fatima gustav
    hanna ivan julia kurt lydia milan nora oscar petra quentin ruth stefan thea umar vivian wanda
    yara zeno agnes bruno celia dario elena fritz gloria henry ines jakob
    """
)

#: Kind of attribute -> its values.
ATTRIBUTES: Final = {
    "colour": _words("red green blue yellow purple orange black white brown grey pink golden"),
    "dish": _words("soup rice beans pasta curry salad pie stew toast cake melon cheese"),
    "home": _words("lima oslo cairo paris delhi quito rome tokyo accra dublin havana perth"),
    "trade": _words("baker smith tailor nurse pilot judge painter miner poet clerk barber lawyer"),
}

CAUSES: Final = _words(
    """
    storm strike drought thunder quarrel eclipse invasion election leak spark avalanche theft
    rumour holiday merger fog frost heatwave scandal wedding accident parade virus typhoon exam
    concert landslide meteor festival siege verdict auction lecture shipwreck harvest robbery curfew
    embargo treaty riot overload sabotage mutiny inflation tremor geyser swarm hail monsoon blizzard
    drill duel feast pilgrimage census picnic rally regatta tournament premiere
    """
)

EFFECTS: Final = _words(
    """
    flood hunger silence panic applause darkness poverty laughter rust smoke delay debt
    gossip crowding profit blindness icing thirst shame joy injury noise fever wreckage relief
    dancing rubble crater queues famine prison bidding boredom rescue plenty alarm curiosity
    shortage peace looting blackout repair revolt saving cracks steam stings dents mud snowdrifts
    readiness wounds fullness blisters statistics ants speeches medals trophies tears
    """
)

#: Theme -> the words of its filler sentences.
THEMES: Final = {
    "sea": _words(
        """
        gull tide wave anchor reef coral salt foam sail mast keel harbour buoy whale crab oyster
        kelp pearl dolphin shark lagoon island beach shell squid herring net captain deck rudder
        compass lighthouse pier dock ferry raft surf drift current brine cod otter seal turtle
        cliff bay shore hull
        """
    ),
    "farm": _words(
        """
        cow hay barn plough wheat barley fence goat hen rooster egg milk butter cart mule pasture
        meadow orchard apple pear plum seed soil furrow scythe stable saddle pony lamb wool duck
        goose pond mill flour oats corn turnip cabbage onion beet hedge gate ditch bucket shovel
        rake manger
        """
    ),
    "city": _words(
        """
        tram bus street bridge tower bank cinema theatre museum square fountain subway ticket
        office elevator stairs lobby hotel taxi traffic signal billboard kiosk newspaper market
        mall shop clinic school library court avenue alley garage crane statue balcony roof
        chimney sidewalk lamp neon siren police crowd suburb station plaza
        """
    ),
}

VOCABULARY: Final = (
    PAD,
    START,
    *GRAMMAR,
    *ATTRIBUTES,
    *THEMES,
    *NAMES,
    *(value for values in ATTRIBUTES.values() for value in values),
    *CAUSES,
    *EFFECTS,
    *(word for words in THEMES.values() for word in words),
)

assert len(set(VOCABULARY)) == len(VOCABULARY), "a word has two roles"
