/* protocol.pml: the ring's protocol with deaths, for Spin. One writer, two readers, two slots, three
 * messages; any DEATHS of the processes die, each at any step. It assumes sequential consistency
 * (what csrc/ does about weaker memory is the explorer's), and has the names of the source: the
 * states of fipc_peer.h, the cases of fipc_ring.h, the doorbells.
 *
 * What must hold: a reader sees every message whole, in order, once; nobody sleeps for ever, and
 * without a death nobody is woken by the end of a slice (that would be a lost wake-up); when all
 * survivors have ended, each has sent, or got, everything, or has said who died. Nobody alive is
 * declared dead.
 *
 * make spin: one slot and two messages, and the protocols that are wrong on purpose (MUTANT_...);
 * make spin-full: two slots and three messages, and two deaths, and PeerDied instead of evicting.
 */
#ifndef DEATHS
#define DEATHS 1
#endif
#ifndef EVICT
#define EVICT 1
#endif
#define READERS 2
#ifndef SLOTS
#define SLOTS 2
#endif
#ifndef MESSAGES
#define MESSAGES 3
#endif
#define CURSOR_LEFT 255
#define SLICES 6 /* of sleep in all, after which nobody will act any more */

mtype = { FREE, JOINING, ACTIVE, LEFT, DEAD };

/* the segment */
byte written[SLOTS];
byte payload[SLOTS]; /* 0: half a message */
byte cursor[READERS];
mtype state[READERS] = FREE;
bool closed;         /* writer_state */
bool data_sleeper;   /* bit 0 of data_bell, and its count */
byte data_bell;
bool room_sleeper;
byte room_bell;
byte room_target;
/* the kernel's */
bool writer_lock = true;
bool reader_lock[READERS];

/* of the world, for the assertions */
byte deaths;
byte slice; /* of sleep: time is long, so it ends only when nobody can do anything else */
bool writer_ended, reader_ended[READERS];
bool writer_died, reader_died[READERS];

/* Before each step that others can see, and before each sleep, whoever takes it may die instead: the
 * kernel lets go of its lock. */
#define STEP                                                                                       \
    if                                                                                             \
    :: true                                                                                        \
    :: deaths < DEATHS -> deaths++; goto killed                                                    \
    fi

/* (The count comes around after more rings than there are in a run, as 31 bits do.) */
#define RING(bell, sleeper)                                                                        \
    d_step {                                                                                       \
        sleeper = false;                                                                           \
        bell = (bell + 1) % 32                                                                     \
    }

/* Sleeps until the bell's word is no longer what was seen, or until the slice is over. */
#define SLEEP(bell, sleeper, seen)                                                                 \
    slept_in = slice;                                                                              \
    d_step {                                                                                       \
        bell != seen || !sleeper || slice != slept_in;                                             \
        slept_in = 0;                                                                              \
        seen = 0                                                                                   \
    }

/* The writer looks at each cursor. In one step: they only grow, so looks one after the other find
 * nothing else than one look at one of these moments. */
inline scan() {
    d_step {
        slowest = CURSOR_LEFT;
        i = 0;
        do
        :: i == READERS -> break
        :: else ->
            if
            :: counted[i] && cursor[i] < slowest -> slowest = cursor[i]
            :: else
            fi;
            i++
        od;
        room = slowest >= next - 1 || next - 1 - slowest < SLOTS;
        slowest = 0;
        i = 0
    }
}

active proctype writer() {
    byte next = 1;
    byte slowest;
    byte i;
    byte seen;
    byte slept_in;
    bool room;
    bool sleeper;
    bool counted[READERS];
    byte n_counted = READERS;
    counted[0] = true;
    counted[1] = true;

send:
    do
    :: next > MESSAGES -> goto close
    :: else ->
        /* room: case 1 or 4 */
        do
        :: true ->
            scan();
            if
            :: room -> break
            :: else
            fi;
            atomic { STEP; room_target = next - SLOTS };
            atomic { STEP; d_step { room_sleeper = true; seen = room_bell } };
#ifndef MUTANT_LOOK_FIRST
            scan();
            if
            :: room -> break
            :: else
            fi;
#endif
            STEP;
            SLEEP(room_bell, room_sleeper, seen);
            /* a probe, after a slice and at any other time */
            i = 0;
            do
            :: i == READERS -> break
            :: else ->
                if
                :: counted[i] && (state[i] == JOINING || state[i] == ACTIVE) ->
                    if
                    :: reader_lock[i] -> skip
                    :: !reader_lock[i] ->
#ifndef MUTANT_ONE_LOOK
                        if
                        :: state[i] == LEFT -> skip
                        :: else ->
#endif
                            assert(reader_died[i]); /* else: a living one is declared dead */
                            if
                            :: !EVICT -> goto raise
                            :: EVICT ->
#ifndef MUTANT_COUNT_DEAD
                                counted[i] = false;
                                n_counted--;
                                atomic { STEP; cursor[i] = CURSOR_LEFT };
#endif
                                atomic { STEP; state[i] = DEAD };
                            fi
#ifndef MUTANT_ONE_LOOK
                        fi
#endif
                    fi
                :: counted[i] && state[i] == LEFT -> counted[i] = false; n_counted--
                :: counted[i] && state[i] == FREE && !reader_lock[i] && reader_died[i] ->
                    goto raise /* it never attached: wait_until_ready says who is missing */
                :: else
                fi;
                i++
            od;
            i = 0;
            if
            :: n_counted == 0 -> goto raise /* Closed: everyone has gone */
            :: else
            fi
        od;
        /* 1 -> 2 */
#ifdef MUTANT_PUBLISH_FIRST
        atomic { STEP; written[(next - 1) % SLOTS] = next };
#endif
        atomic { STEP; payload[(next - 1) % SLOTS] = 0 };
        atomic { STEP; payload[(next - 1) % SLOTS] = next };
#ifdef MUTANT_BELL_FIRST
        sleeper = data_sleeper;
#endif
#ifndef MUTANT_PUBLISH_FIRST
        atomic { STEP; written[(next - 1) % SLOTS] = next };
#endif
#ifndef MUTANT_BELL_FIRST
        sleeper = data_sleeper;
#endif
        next++;
        if
        :: sleeper -> sleeper = false; atomic { STEP; RING(data_bell, data_sleeper) }
        :: else
        fi
    od;

close:
#ifdef MUTANT_UNLOCK_FIRST
    atomic { STEP; writer_lock = false };
#endif
    atomic { STEP; closed = true };
    atomic { STEP; RING(data_bell, data_sleeper) };
    atomic { STEP; writer_lock = false };
    writer_ended = true;
    goto done;

raise: /* PeerDied, or Closed: then the writer closes, as its user does */
    closed = true;
    RING(data_bell, data_sleeper);
    writer_lock = false;
    writer_ended = true;
    goto done;

killed:
    skip;
    d_step { writer_died = true; writer_lock = false };
done:
    skip
}

proctype reader(byte me) {
    byte next = 1;
    byte seen;
    byte slept_in;
    byte i;
    bool last;
    bool early;

    atomic { STEP; reader_lock[me] = true };
    atomic { STEP; state[me] = JOINING };
    atomic { STEP; RING(room_bell, room_sleeper) };

    do
    :: next > MESSAGES -> break
    :: me == 1 && next == 2 -> early = true; break /* it may leave before the end */
    :: next <= MESSAGES ->
        /* case 2 or 3, or wait for it */
        if
        :: written[(next - 1) % SLOTS] == next -> goto read
        :: else
        fi;
        atomic { STEP; d_step { data_sleeper = true; seen = data_bell } };
        if
        :: written[(next - 1) % SLOTS] == next -> goto read
        :: else
        fi;
        if
        :: closed ->
#ifndef MUTANT_NO_DRAIN
            if
            :: written[(next - 1) % SLOTS] == next -> goto read
            :: else -> break /* Closed, and drained */
            fi
#else
            break
#endif
        :: !closed
        fi;
        STEP;
        SLEEP(data_bell, data_sleeper, seen);
        if
        :: !writer_lock && !closed ->
            assert(writer_died); /* else: a living writer is declared dead */
            if
            :: written[(next - 1) % SLOTS] == next -> goto read
            :: else -> break /* PeerDied, and drained */
            fi
        :: else
        fi;
        goto again;
read:
#ifdef MUTANT_ACK_FIRST
        atomic { STEP; cursor[me] = next };
#endif
        STEP;
        assert(payload[(next - 1) % SLOTS] == next);
        atomic { STEP; cursor[me] = next }; /* 2 -> 3, 3 -> 4 */
        if
        :: room_sleeper && next >= room_target ->
            d_step {
                last = true;
                i = 0;
                do
                :: i == READERS -> break
                :: else ->
                    last = last && cursor[i] >= room_target;
                    i++
                od;
                i = 0
            }
            if
#ifdef MUTANT_NO_RING
            :: last && false
#else
            :: last -> last = false; atomic { STEP; RING(room_bell, room_sleeper) }
#endif
            :: else
            fi
        :: else
        fi;
        next++;
again:
        skip
    od;

    /* every message, unless the writer died or had a reason to end */
    assert(next > MESSAGES || early || writer_died || deaths > 0);
#ifdef MUTANT_UNLOCK_FIRST
    atomic { STEP; reader_lock[me] = false };
#endif
    atomic { STEP; cursor[me] = CURSOR_LEFT };
    atomic { STEP; state[me] = LEFT };
    atomic { STEP; RING(room_bell, room_sleeper) };
    atomic { STEP; reader_lock[me] = false };
    reader_ended[me] = true;
    goto done;

killed:
    skip;
    d_step { reader_died[me] = true; reader_lock[me] = false };
done:
    skip
}

#define ALL_ENDED                                                                                  \
    ((writer_ended || writer_died) && (reader_ended[0] || reader_died[0]) &&                       \
     (reader_ended[1] || reader_died[1]))

active proctype clock() {
    do
    :: timeout ->
        if
        :: ALL_ENDED -> break
        :: else ->
            assert(deaths > 0); /* else: a lost wake-up */
            slice++;
            assert(slice < SLICES) /* else: a death that nobody notices */
        fi
    od;
    assert(writer_died || closed);
    assert(deaths > 0 || (written[(MESSAGES - 1) % SLOTS] == MESSAGES &&
                          state[0] == LEFT && state[1] == LEFT))
}

init {
    atomic {
        run reader(0);
        run reader(1)
    }
}
