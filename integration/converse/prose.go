package converse

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"time"
)

// Conversation is one scripted chat: what the user says and when. What the model answers is not part of it, because
// a real client sends back the answers it really received.
type Conversation struct {
	// System is the system prompt, shared byte for byte with other conversations.
	System string
	// Start is when the first turn is sent, counted from the start of the play.
	Start time.Duration
	// Turns are the user's messages, at least one.
	Turns []Turn
}

// Turn is one message of the user.
type Turn struct {
	// Think is the pause between the end of the previous answer and this message.
	Think time.Duration
	// Text is the message.
	Text string
}

// Generate writes conversations that look like an assistant's day. Each has one of systemPrompts system prompts (2 to
// 4 KB) and a first message with a few KB of pasted text, which the following ones ask about; most have 3 to 6 turns, one
// in five has 7 to 10. The longest prompts are about 13 KB. All start within seven seconds, and users think for about one
// second: less than people do, so that a play takes seconds and not minutes. The same arguments give the same conversations.
func Generate(seed uint64, conversations, systemPrompts int) []Conversation {
	rng := rand.New(rand.NewPCG(seed, 0))
	systems := make([]string, max(1, systemPrompts))
	for i := range systems {
		systems[i] = themes[i%len(themes)].systemPrompt(rng, i)
	}
	list := make([]Conversation, conversations)
	for i := range list {
		turns, start := 3+rng.IntN(4), rng.IntN(7000)
		if i%5 == 0 { // these start early, so that a play does not end with them alone
			turns, start = 7+rng.IntN(4), rng.IntN(1000)
		}
		which := rng.IntN(len(systems))
		c := Conversation{System: systems[which], Start: time.Duration(start) * time.Millisecond}
		for t := range turns {
			turn := Turn{Text: themes[which%len(themes)].message(rng, t)}
			if t > 0 {
				turn.Think = time.Duration(300+rng.IntN(1200)) * time.Millisecond
			}
			c.Turns = append(c.Turns, turn)
		}
		list[i] = c
	}
	return list
}

// desk is the subject of an assistant: the words that fill the blanks of the sentences below.
type desk struct {
	company, role string
	things        []string // what customers have
	actions       []string // what can be done with a thing
	troubles      []string // what goes wrong with a thing, after its name
}

func (d desk) systemPrompt(rng *rand.Rand, n int) string {
	var b strings.Builder
	fmt.Fprintf(&b, "You are %s of %s (edition %d of these instructions). %s\n\nRules:\n",
		d.role, d.company, n+1, d.fill(rng, "You help customers to {action}, and you answer in plain language, briefly and truthfully."))
	size := 1300 + rng.IntN(1200)
	for i := 1; b.Len() < size; i++ {
		fmt.Fprintf(&b, "%d. %s\n", i, d.sentence(rng, rules))
	}
	b.WriteString("\nFacts you may rely on:\n")
	for size += 800 + rng.IntN(600); b.Len() < size; {
		fmt.Fprintf(&b, "- %s\n", d.sentence(rng, facts))
	}
	b.WriteString("\nIf you do not know, say so and offer to hand over to a colleague.")
	return b.String()
}

// message is what the user says in turn t, counted from 0. The first message brings the papers that all is about, the
// later ones are short, or add a letter.
func (d desk) message(rng *rand.Rand, t int) string {
	bank, letter := followUps, 0
	switch {
	case t == 0:
		bank, letter = openings, 25+rng.IntN(45)
	case rng.IntN(3) == 0:
		letter = 3 + rng.IntN(8)
	}
	text := d.sentence(rng, bank)
	for range rng.IntN(3) {
		text += " " + d.sentence(rng, details)
	}
	if letter > 0 {
		text += "\n\nThis is what they wrote to me:\n"
		for range letter {
			text += "\n> " + d.sentence(rng, pasted)
		}
	}
	return text
}

func (d desk) sentence(rng *rand.Rand, bank []string) string {
	return d.fill(rng, bank[rng.IntN(len(bank))])
}

// fill replaces each {blank} by a word of its kind.
func (d desk) fill(rng *rand.Rand, sentence string) string {
	var b strings.Builder
	for {
		before, rest, found := strings.Cut(sentence, "{")
		b.WriteString(before)
		if !found {
			return b.String()
		}
		blank, after, _ := strings.Cut(rest, "}")
		sentence = after
		pick := func(list []string) { b.WriteString(list[rng.IntN(len(list))]) }
		switch blank {
		case "thing":
			pick(d.things)
		case "action":
			pick(d.actions)
		case "trouble":
			pick(d.troubles)
		case "name":
			pick(names)
		case "place":
			pick(places)
		case "day":
			pick(days)
		case "n":
			fmt.Fprint(&b, 2+rng.IntN(58))
		case "ref":
			fmt.Fprintf(&b, "%c%c-%05d", 'A'+rng.IntN(26), 'A'+rng.IntN(26), rng.IntN(100000))
		case "sum":
			fmt.Fprintf(&b, "%d.%02d euros", 5+rng.IntN(900), rng.IntN(100))
		default:
			panic("converse: unknown blank {" + blank + "}")
		}
	}
}

var themes = []desk{
	{
		company: "Harbour Broadband", role: "the support assistant",
		things:   []string{"router", "fibre line", "wall socket", "mesh extender", "phone adapter", "static address", "contract"},
		actions:  []string{"move a line to a new flat", "restart the router safely", "read a bill", "change the tariff", "book a technician"},
		troubles: []string{"drops the connection every evening", "blinks red", "is slower than promised", "stopped after the storm", "was billed twice"},
	},
	{
		company: "the Meridian travel desk", role: "the booking assistant",
		things:   []string{"rail ticket", "hotel room", "rental car", "group booking", "seat reservation", "travel insurance", "voucher"},
		actions:  []string{"rebook a missed connection", "add a traveller", "claim a delay", "cancel without a fee", "choose quieter seats"},
		troubles: []string{"shows the wrong date", "was cancelled without notice", "does not arrive by mail", "has a misspelt name", "cannot be paid by card"},
	},
	{
		company: "Oak & Fenwick Insurance", role: "the claims assistant",
		things:   []string{"household policy", "bicycle cover", "water damage claim", "expert report", "deductible", "repair invoice", "inventory list"},
		actions:  []string{"file a claim", "send photographs", "choose a repair shop", "understand a decision", "appeal against a refusal"},
		troubles: []string{"was refused without a reason", "is missing two pages", "took longer than a month", "names the wrong address", "covers only half of the loss"},
	},
	{
		company: "the Lindenhof clinic", role: "the appointment assistant",
		things:   []string{"referral", "appointment", "laboratory result", "prescription", "vaccination record", "sick note", "X-ray image"},
		actions:  []string{"find an earlier appointment", "prepare for an examination", "renew a prescription", "send documents to a specialist", "register a child"},
		troubles: []string{"has not reached the specialist", "is for the wrong department", "ran out yesterday", "clashes with my shift", "lists an old medicine"},
	},
	{
		company: "Tessel Tools", role: "the engineering assistant",
		things:   []string{"build pipeline", "message queue", "database replica", "access token", "log exporter", "container image", "staging cluster"},
		actions:  []string{"roll back a release", "rotate the tokens", "read a stack trace", "raise a quota", "add a read replica"},
		troubles: []string{"times out under load", "fails only on the second attempt", "grows until the disk is full", "restarts every few minutes", "returns stale rows"},
	},
}

var (
	names  = []string{"Amara", "Bengt", "Chiara", "Dmitri", "Elif", "Farid", "Greta", "Hiroshi", "Ines", "Jonas", "Katya", "Luis"}
	places = []string{"Antwerp", "Bergen", "Coimbra", "Dresden", "Espoo", "Florence", "Ghent", "Haarlem", "Innsbruck", "Kaunas"}
	days   = []string{"Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "1 March", "15 April", "the last day of May"}

	rules = []string{
		"Before you {action} for anybody, ask for the reference, which looks like {ref}, and repeat it back.",
		"Never promise a refund above {sum}; say that {name} from the {place} office decides within {n} hours.",
		"When a {thing} {trouble}, first ask what changed on the day it began.",
		"Offer at most {n} steps at a time, and wait until the customer confirms that each one worked.",
		"Do not guess the state of a {thing}; look it up, or say that you cannot see it.",
		"If the customer mentions {place}, remember that the office there is closed on {day}.",
		"Questions about a {thing} older than {n} months go to the archive team, with the reference and a summary of two lines.",
		"Quote prices with tax, and say until which day they hold.",
		"A customer who has written more than {n} times about the same {thing} is called back by a person on {day}.",
		"Keep the names of other customers out of the answer, even when they appear in a pasted message.",
		"If a message is angry, acknowledge the trouble in one sentence and go on with the solution.",
		"Use the metric system, the twenty-four hour clock, and the customer's own words for the {thing}.",
	}
	facts = []string{
		"It takes {n} days to {action}, and {n} days more in {place}.",
		"A {thing} costs {sum} for the first year and {sum} after that.",
		"Since {day} a {thing} can be returned within {n} days.",
		"The form to {action} has the number {ref}.",
		"{name} is responsible for every {thing} in {place}, {name} for the rest.",
		"If a {thing} {trouble}, the known remedy is to wait {n} minutes and try again.",
	}
	openings = []string{
		"Hello, my {thing} {trouble} and I do not know where to begin.",
		"Good morning. I would like to {action}, reference {ref}; can you help me?",
		"I wrote to {name} in {place} on {day}, but my {thing} still {trouble}.",
		"We are {n} people in {place} and want to {action} before {day}. How does it work?",
	}
	followUps = []string{
		"Thank you. And what if the {thing} {trouble} again?",
		"I tried that, and now the {thing} {trouble} instead.",
		"Could you explain the second point once more, as if I had never seen a {thing}?",
		"Understood. How much would it cost to {action}, and can it be done by {day}?",
		"The number on the letter is {ref}; does that change what you said?",
		"Please write me a short message to {name} in {place} that sums this up.",
		"One more thing: my neighbour says that one can {action} for {sum}. Is that true?",
	}
	details = []string{
		"It started on {day}, about {n} minutes after somebody tried to {action}.",
		"The {thing} itself is {n} months old.",
		"I paid {sum} for it in {place}.",
		"{name} on the telephone told me to wait {n} days, which I did.",
		"I have to leave for {place} on {day}, so it is rather urgent.",
	}
	pasted = []string{
		"Dear customer, we have received your letter about the {thing} on {day}.",
		"Our records show that the {thing} with the reference {ref} was changed by {name} in {place}.",
		"Please note that a {thing} that {trouble} is not covered after {n} months.",
		"You may {action} at no cost until {day}; after that the fee is {sum}.",
		"For any further question write to {name}, {place}, and quote {ref}.",
		"We regret the delay of {n} days and have credited {sum} to your account.",
		"If the {thing} still {trouble}, kindly send us {n} photographs.",
	}
)
