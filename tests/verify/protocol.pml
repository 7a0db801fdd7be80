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
 *   spin -a protocol.pml && cc -O2 -DSAFETY -o pan pan.c && ./pan -m100000
 *   spin -DDEATHS=2 -DEVICT=0 ...      two deaths; PeerDied is raised instead of evicting
 *   spin -DMUTANT_... ...              a protocol that is wrong: see the Makefile
 */
#ifndef DEATHS
#define DEATHS 1
#endif
#ifndef EVICT
#define EVICT 1
#endif
#define READERS 2
#define SLOTS 2
#define MESSAGES 3
#define CURSOR_LEFT 255
#define SLICES 6 /* of sleep in all, after which nobody will act any more */

mtype = { FREE, JOINING, ACTIVE, LEFT, DEAD };

/* the segment */
byte written[SLOTS];
byte payload[SLOTS]; /* 0: half a message */
byte cursor[READERS];
mtype state[READERS] = FREE;
bool closed;         /* writer_state */
bool data_sleeper;   /* bit 0 of data_bell, and its count, which wraps */
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

/* Before each step whoever takes it may die instead: the kernel lets go of its lock. */
#define STEP                                                                                       \
    if                                                                                             \
    :: true                                                                                        \
    :: deaths < DEATHS -> deaths++; goto killed                                                    \
    fi

#define RING(bell, sleeper)                                                                        \
    d_step {                                                                                       \
        sleeper = false;                                                                           \
        bell = (bell + 1) % 8                                                                      \
    }

/* Sleeps until the bell's word is no longer what was seen, or until the slice is over. */
#define SLEEP(bell, sleeper, seen)                                                                 \
    d_step { slept_in = slice; skip };                                                             \
    bell != seen || !sleeper || slice != slept_in

active proctype writer() {
    byte next = 1;
    byte slowest;
    byte i;
    byte seen;
    byte slept_in;
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
            atomic { /* one look at each cursor; in any order, since they only grow */
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
                od
            }
            if
            :: slowest >= next - 1 || next - 1 - slowest < SLOTS -> break
            :: else
            fi;
            STEP;
#ifdef MUTANT_LOOK_FIRST
            /* no second look after the announcement */
            room_target = next - SLOTS;
            d_step { room_sleeper = true; seen = room_bell }
#else
            room_target = next - SLOTS;
            d_step { room_sleeper = true; seen = room_bell }
            STEP;
            atomic {
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
                od
            }
            if
            :: slowest >= next - 1 || next - 1 - slowest < SLOTS -> break
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
                                STEP;
#ifndef MUTANT_COUNT_DEAD
                                counted[i] = false;
                                n_counted--;
#endif
                                STEP;
#ifndef MUTANT_KEEP_CURSOR
                                cursor[i] = CURSOR_LEFT;
#endif
                                STEP;
                                state[i] = DEAD
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
            if
            :: n_counted == 0 -> goto raise /* Closed: everyone has gone */
            :: else
            fi
        od;
        STEP;
        /* 1 -> 2 */
#ifdef MUTANT_PUBLISH_FIRST
        written[(next - 1) % SLOTS] = next;
        payload[(next - 1) % SLOTS] = 0;
        STEP;
        payload[(next - 1) % SLOTS] = next;
#else
        payload[(next - 1) % SLOTS] = 0;
        STEP;
        payload[(next - 1) % SLOTS] = next;
        STEP;
#ifdef MUTANT_BELL_FIRST
        sleeper = data_sleeper;
        STEP;
#endif
        written[(next - 1) % SLOTS] = next;
#endif
        STEP;
#ifndef MUTANT_BELL_FIRST
        sleeper = data_sleeper;
#endif
        next++;
        if
        :: sleeper -> STEP; RING(data_bell, data_sleeper)
        :: else
        fi
    od;

close:
    STEP;
#ifdef MUTANT_UNLOCK_FIRST
    writer_lock = false;
    STEP;
#endif
    closed = true;
    STEP;
    RING(data_bell, data_sleeper);
    STEP;
    writer_lock = false;
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
    byte got;
    bool last;
    bool drained;

    STEP;
    reader_lock[me] = true;
    STEP;
    state[me] = JOINING;
    STEP;
    RING(room_bell, room_sleeper);

    do
    :: next > MESSAGES -> break
    :: else ->
        /* case 2 or 3, or wait for it */
        if
        :: written[(next - 1) % SLOTS] == next -> goto read
        :: else
        fi;
        STEP;
        d_step { data_sleeper = true; seen = data_bell }
        STEP;
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
        STEP;
#ifdef MUTANT_ACK_FIRST
        cursor[me] = next;
        STEP;
#endif
        got = payload[(next - 1) % SLOTS];
        assert(got == next);
        STEP;
        cursor[me] = next; /* 2 -> 3, 3 -> 4 */
        STEP;
        if
        :: room_sleeper && next >= room_target ->
            i = 0;
            last = true;
            do
            :: i == READERS -> break
            :: else ->
                last = last && cursor[i] >= room_target;
                i++
            od;
            if
#ifdef MUTANT_NO_RING
            :: last && false
#else
            :: last -> STEP; RING(room_bell, room_sleeper)
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
    assert(next > MESSAGES || writer_died || deaths > 0);
    STEP;
#ifdef MUTANT_UNLOCK_FIRST
    reader_lock[me] = false;
    STEP;
#endif
    cursor[me] = CURSOR_LEFT;
    STEP;
    state[me] = LEFT;
    STEP;
    RING(room_bell, room_sleeper);
    STEP;
    reader_lock[me] = false;
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
