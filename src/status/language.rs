//! The languages of the page: its words, numerals and dates.
//!
//! English and Arabic readers get dates of the Gregorian calendar, Persian ones of the Solar Hijri; Arabic and Persian
//! numbers are written in the numerals of each, with the signs that go with them. Times are UTC's, and say so.

use filters::status::Level;
use filters::status::days::{WHOLE, begin_ms, day_of};
use icu_calendar::Date;
use icu_calendar::cal::Persian;
use jiff::Timestamp;
use jiff::civil::DateTime;
use jiff::tz::TimeZone;

/// A language of the page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Language {
    English,
    Arabic,
    Persian,
}

/// What the page says in one language.
pub(super) struct Words {
    pub(super) service_status: &'static str,
    pub(super) all_operational: &'static str,
    pub(super) some_degraded: &'static str,
    pub(super) some_partly: &'static str,
    pub(super) some_down: &'static str,
    pub(super) all_down: &'static str,
    pub(super) no_data_yet: &'static str,
    /// By [`Level::number`].
    pub(super) levels: [&'static str; 4],
    pub(super) no_data: &'static str,
    pub(super) languages: &'static str,
    pub(super) open_incidents: &'static str,
    pub(super) past_incidents: &'static str,
    pub(super) no_past_incidents: &'static str,
    pub(super) models: &'static str,
    pub(super) no_models: &'static str,
    pub(super) regions: &'static str,
    pub(super) routes: &'static str,
    pub(super) days_of: &'static str,
    pub(super) days_ago: &'static str,
    pub(super) today: &'static str,
    pub(super) good_calls: &'static str,
    pub(super) legend: &'static str,
    pub(super) jobs: &'static str,
    pub(super) jobs_well: &'static str,
    pub(super) jobs_ill: &'static str,
    pub(super) job: &'static str,
    pub(super) job_state: &'static str,
    pub(super) job_done: &'static str,
    pub(super) job_well: &'static str,
    pub(super) job_failed: &'static str,
    pub(super) job_late: &'static str,
    pub(super) never: &'static str,
    pub(super) goal: &'static str,
    pub(super) read_only: &'static str,
    pub(super) updated: &'static str,
    pub(super) times_in_utc: &'static str,
    pub(super) feed: &'static str,
    pub(super) affects: &'static str,
    pub(super) everything: &'static str,
    pub(super) began: &'static str,
    pub(super) ended: &'static str,
    pub(super) incident_degraded: &'static str,
    pub(super) incident_partly: &'static str,
    pub(super) incident_down: &'static str,
    pub(super) said_opened: &'static str,
    pub(super) said_worse: &'static str,
    pub(super) said_again: &'static str,
    pub(super) said_note: &'static str,
    pub(super) said_closed: &'static str,
    pub(super) more_models: &'static str,
    pub(super) skip: &'static str,
    separator: &'static str,
    months: [&'static str; 12],
}

impl Language {
    pub const ALL: [Self; 3] = [Self::English, Self::Arabic, Self::Persian];

    /// The language of a code such as `fa`.
    #[must_use]
    pub fn named(code: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|language| language.code() == code)
    }

    /// Its code (BCP 47).
    #[must_use]
    pub const fn code(self) -> &'static str {
        match self {
            Self::English => "en",
            Self::Arabic => "ar",
            Self::Persian => "fa",
        }
    }

    /// Which way it is written.
    #[must_use]
    pub const fn direction(self) -> &'static str {
        match self {
            Self::English => "ltr",
            Self::Arabic | Self::Persian => "rtl",
        }
    }

    /// What it calls itself.
    pub(super) const fn own_name(self) -> &'static str {
        match self {
            Self::English => "English",
            Self::Arabic => "العربية",
            Self::Persian => "فارسی",
        }
    }

    /// The language for a reader: the one asked for by `?lang=`, or the best of `Accept-Language`, or the first.
    #[must_use]
    pub fn of_reader(query: &str, accepts: &str, offered: &[Self]) -> Self {
        let asked = query.split('&').find_map(|pair| pair.strip_prefix("lang=")).and_then(Self::named);
        let offers = |language: &Self| offered.contains(language);
        let first = offered.first().copied().unwrap_or(Self::English);
        asked.filter(offers).or_else(|| accepted(accepts, offered)).unwrap_or(first)
    }

    pub(super) const fn words(self) -> &'static Words {
        match self {
            Self::English => &ENGLISH,
            Self::Arabic => &ARABIC,
            Self::Persian => &PERSIAN,
        }
    }

    /// A whole number in its numerals.
    pub(super) fn number(self, number: u64) -> String {
        self.numerals(&number.to_string())
    }

    /// Hundred-thousandths as percent with three digits at most: `99.98 %` as each writes it.
    pub(super) fn percent(self, share: u32) -> String {
        let (whole, rest) = (share / (WHOLE / 100), share % (WHOLE / 100));
        let rest = format!("{rest:03}");
        let rest = rest.trim_end_matches('0');
        let number = if rest.is_empty() { whole.to_string() } else { format!("{whole}.{rest}") };
        match self {
            Self::English => format!("{number}%"),
            Self::Arabic | Self::Persian => format!("{}٪", self.numerals(&number)),
        }
    }

    /// A day since 1970, such as `30 November 2026`.
    pub(super) fn date(self, day: i64) -> String {
        let civil = civil(begin_ms(day));
        let (year, month, day) = match self {
            Self::English | Self::Arabic => (i64::from(civil.year()), civil.month(), civil.day()),
            Self::Persian => persian(civil),
        };
        let month = usize::try_from(month).ok().and_then(|month| self.words().months.get(month - 1));
        let (year, day) = (self.numerals(&year.to_string()), self.numerals(&day.to_string()));
        format!("{day} {} {year}", month.copied().unwrap_or_default())
    }

    /// A moment, such as `30 November 2026, 14:05 UTC`.
    pub(super) fn moment(self, unix_ms: i64) -> String {
        let (date, civil) = (self.date(day_of(unix_ms)), civil(unix_ms));
        let time = self.numerals(&format!("{:02}:{:02}", civil.hour(), civil.minute()));
        format!("{date}{} {time} UTC", self.words().separator)
    }

    /// Names one after the other.
    pub(super) const fn separator(self) -> &'static str {
        self.words().separator
    }

    /// A level as the page names it; `None`: nothing is known.
    pub(super) fn level(self, level: Option<Level>) -> &'static str {
        let words = self.words();
        let name = level.and_then(|level| words.levels.get(usize::from(level.number())));
        name.copied().unwrap_or(words.no_data)
    }

    /// Digits and the decimal sign of a number as it writes them.
    fn numerals(self, ascii: &str) -> String {
        let zero = match self {
            Self::English => return ascii.to_owned(),
            Self::Arabic => '٠',
            Self::Persian => '۰',
        };
        let own = |c: char| match c.to_digit(10) {
            Some(digit) => char::from_u32(u32::from(zero) + digit).unwrap_or(c),
            None if c == '.' => '٫',
            None => c,
        };
        ascii.chars().map(own).collect()
    }
}

/// The best language of an `Accept-Language` head that is offered (RFC 9110 §12.5.4), by its first subtag.
fn accepted(accepts: &str, offered: &[Language]) -> Option<Language> {
    /// So many of them are read.
    const RANGES_MAX: usize = 32;
    let ranges = accepts.split(',').take(RANGES_MAX).filter_map(|range| {
        let mut parts = range.split(';').map(str::trim);
        let tag = parts.next()?.to_ascii_lowercase();
        let quality =
            parts.find_map(|part| part.strip_prefix("q=")).map_or(Some(1.0), |q| q.parse::<f32>().ok());
        let quality = quality.filter(|quality| (0.0..=1.0).contains(quality) && *quality > 0.0)?;
        let language = Language::named(tag.split('-').next()?)?;
        offered.contains(&language).then_some((language, quality))
    });
    // The first of equals counts.
    ranges.reduce(|best, next| if next.1 > best.1 { next } else { best }).map(|(language, _)| language)
}

fn civil(unix_ms: i64) -> DateTime {
    TimeZone::UTC.to_datetime(Timestamp::from_millisecond(unix_ms).unwrap_or_default())
}

/// Year, month and day of the Solar Hijri calendar.
fn persian(civil: DateTime) -> (i64, i8, i8) {
    let gregorian = (i32::from(civil.year()), civil.month().unsigned_abs(), civil.day().unsigned_abs());
    let Ok(date) = Date::try_new_gregorian(gregorian.0, gregorian.1, gregorian.2) else {
        return (i64::from(civil.year()), civil.month(), civil.day());
    };
    let date = date.to_calendar(Persian);
    let small = |number: u8| i8::try_from(number).unwrap_or(1);
    (i64::from(date.year().extended_year()), small(date.month().ordinal), small(date.day_of_month().0))
}

/// A moment as machines read it (RFC 3339).
pub(super) fn rfc3339(unix_ms: i64) -> String {
    Timestamp::from_millisecond(unix_ms / 1000 * 1000).unwrap_or_default().to_string()
}

/// A moment as RSS wants it (RFC 822, with four digits of the year).
pub(super) fn rfc822(unix_ms: i64) -> String {
    civil(unix_ms).strftime("%a, %d %b %Y %H:%M:%S +0000").to_string()
}

const ENGLISH: Words = Words {
    service_status: "Service status",
    all_operational: "All systems operational",
    some_degraded: "Running with less in reserve",
    some_partly: "Some calls are failing",
    some_down: "Some models are down",
    all_down: "All models are down",
    no_data_yet: "Nothing to report yet",
    levels: ["Operational", "Degraded", "Partly down", "Down"],
    no_data: "No data",
    languages: "Languages",
    open_incidents: "Happening now",
    past_incidents: "Past incidents",
    no_past_incidents: "No incidents in the past 90 days.",
    models: "Models",
    no_models: "No models are served.",
    regions: "Regions",
    routes: "Routes",
    days_of: "Day by day",
    days_ago: "90 days ago",
    today: "Today",
    good_calls: "of calls answered",
    legend: "What the signs mean",
    jobs: "Periodic jobs",
    jobs_well: "All of them are on time",
    jobs_ill: "Some are late or have failed",
    job: "Job",
    job_state: "State",
    job_done: "Last done",
    job_well: "On time",
    job_failed: "Failed",
    job_late: "Late",
    never: "never",
    goal: "This month: {share} of calls answered well. The goal is {goal}; {left} of its error budget is left.",
    read_only: "Our records cannot be written just now. Calls go on; history and incidents are shown as last known.",
    updated: "Updated",
    times_in_utc: "Times and days are UTC.",
    feed: "News feed (RSS)",
    affects: "Affects",
    everything: "everything",
    began: "Began",
    ended: "Ended",
    incident_degraded: "Running with less in reserve",
    incident_partly: "Some calls are failing",
    incident_down: "Out of service",
    said_opened: "We see trouble. Nothing has to be done on your side.",
    said_worse: "It has got worse, or affects more models.",
    said_again: "It has come back.",
    said_note: "Update",
    said_closed: "It is over.",
    more_models: "Further models, listed in the JSON:",
    skip: "Skip to the state of the models",
    separator: ",",
    months: [
        "January",
        "February",
        "March",
        "April",
        "May",
        "June",
        "July",
        "August",
        "September",
        "October",
        "November",
        "December",
    ],
};

const ARABIC: Words = Words {
    service_status: "حالة الخدمة",
    all_operational: "جميع الأنظمة تعمل بصورة طبيعية",
    some_degraded: "الخدمة تعمل باحتياطي أقل",
    some_partly: "بعض الطلبات تفشل",
    some_down: "بعض النماذج متوقفة",
    all_down: "جميع النماذج متوقفة",
    no_data_yet: "لا شيء لعرضه بعد",
    levels: ["يعمل", "أداء منخفض", "متوقف جزئيًا", "متوقف"],
    no_data: "لا توجد بيانات",
    languages: "اللغات",
    open_incidents: "ما يحدث الآن",
    past_incidents: "حوادث سابقة",
    no_past_incidents: "لا حوادث خلال آخر ٩٠ يومًا.",
    models: "النماذج",
    no_models: "لا تُقدَّم أي نماذج.",
    regions: "المناطق",
    routes: "المسارات",
    days_of: "يومًا بيوم",
    days_ago: "قبل ٩٠ يومًا",
    today: "اليوم",
    good_calls: "من الطلبات أُجيبت",
    legend: "معاني العلامات",
    jobs: "المهام الدورية",
    jobs_well: "جميعها في موعدها",
    jobs_ill: "بعضها متأخر أو فشل",
    job: "المهمة",
    job_state: "الحالة",
    job_done: "آخر إنجاز",
    job_well: "في موعدها",
    job_failed: "فشلت",
    job_late: "متأخرة",
    never: "لم تُنجز قط",
    goal: "هذا الشهر: أُجيب {share} من الطلبات جيدًا. الهدف {goal}، وبقي {left} من هامش الأخطاء.",
    read_only: "لا يمكن تدوين السجلات الآن. الطلبات مستمرة، والسجل والحوادث معروضان كما عُرفا آخر مرة.",
    updated: "آخر تحديث:",
    times_in_utc: "الأوقات والأيام بالتوقيت العالمي UTC.",
    feed: "موجز الأخبار (RSS)",
    affects: "يشمل:",
    everything: "كل شيء",
    began: "البداية:",
    ended: "النهاية:",
    incident_degraded: "الخدمة تعمل باحتياطي أقل",
    incident_partly: "بعض الطلبات تفشل",
    incident_down: "خارج الخدمة",
    said_opened: "رصدنا خللًا. لا يلزمكم فعل شيء.",
    said_worse: "ازداد الأمر سوءًا أو شمل نماذج أخرى.",
    said_again: "عاد الخلل من جديد.",
    said_note: "مستجدات",
    said_closed: "انتهى الأمر.",
    more_models: "نماذج أخرى، مذكورة في ملف JSON:",
    skip: "انتقل إلى حالة النماذج",
    separator: "،",
    months: [
        "يناير",
        "فبراير",
        "مارس",
        "أبريل",
        "مايو",
        "يونيو",
        "يوليو",
        "أغسطس",
        "سبتمبر",
        "أكتوبر",
        "نوفمبر",
        "ديسمبر",
    ],
};

const PERSIAN: Words = Words {
    service_status: "وضعیت سرویس",
    all_operational: "همه چیز به‌درستی کار می‌کند",
    some_degraded: "سرویس با پشتوانهٔ کمتر کار می‌کند",
    some_partly: "برخی درخواست‌ها ناموفق‌اند",
    some_down: "برخی مدل‌ها در دسترس نیستند",
    all_down: "هیچ مدلی در دسترس نیست",
    no_data_yet: "هنوز چیزی برای نمایش نیست",
    levels: ["برقرار", "با افت کارایی", "قطعی جزئی", "قطع"],
    no_data: "بدون داده",
    languages: "زبان‌ها",
    open_incidents: "هم‌اکنون",
    past_incidents: "رخدادهای گذشته",
    no_past_incidents: "در ۹۰ روز گذشته رخدادی نبوده است.",
    models: "مدل‌ها",
    no_models: "هیچ مدلی ارائه نمی‌شود.",
    regions: "مناطق",
    routes: "مسیرها",
    days_of: "روز به روز",
    days_ago: "۹۰ روز پیش",
    today: "امروز",
    good_calls: "از درخواست‌ها پاسخ گرفتند",
    legend: "معنای نشانه‌ها",
    jobs: "کارهای دوره‌ای",
    jobs_well: "همه به‌موقع‌اند",
    jobs_ill: "برخی با تأخیر یا ناموفق‌اند",
    job: "کار",
    job_state: "وضعیت",
    job_done: "آخرین انجام",
    job_well: "به‌موقع",
    job_failed: "ناموفق",
    job_late: "با تأخیر",
    never: "هرگز",
    goal: "این ماه: {share} از درخواست‌ها پاسخ خوب گرفتند. هدف {goal} است و {left} از سهم مجاز خطا مانده است.",
    read_only: "اکنون نوشتن سوابق ممکن نیست. درخواست‌ها ادامه دارند و تاریخچه و رخدادها به آخرین شکل شناخته‌شده نمایش داده می‌شوند.",
    updated: "به‌روزرسانی:",
    times_in_utc: "ساعت‌ها و روزها به وقت جهانی UTC هستند.",
    feed: "خوراک خبر (RSS)",
    affects: "شامل:",
    everything: "همه چیز",
    began: "آغاز:",
    ended: "پایان:",
    incident_degraded: "سرویس با پشتوانهٔ کمتر کار می‌کند",
    incident_partly: "برخی درخواست‌ها ناموفق‌اند",
    incident_down: "خارج از دسترس",
    said_opened: "مشکلی دیده‌ایم. لازم نیست کاری انجام دهید.",
    said_worse: "مشکل بدتر شده یا مدل‌های بیشتری را در بر گرفته است.",
    said_again: "مشکل بازگشته است.",
    said_note: "خبر تازه",
    said_closed: "مشکل برطرف شد.",
    more_models: "مدل‌های دیگر، در فایل JSON:",
    skip: "رفتن به وضعیت مدل‌ها",
    separator: "،",
    months: [
        "فروردین",
        "اردیبهشت",
        "خرداد",
        "تیر",
        "مرداد",
        "شهریور",
        "مهر",
        "آبان",
        "آذر",
        "دی",
        "بهمن",
        "اسفند",
    ],
};

#[cfg(test)]
mod tests {
    use super::*;

    /// 30 November 2026, 14:05 UTC.
    const THEN_MS: i64 = 1_796_047_500_000;

    #[test]
    fn a_reader_gets_what_it_asks_for_or_accepts_best_or_the_first() {
        let all = Language::ALL;
        let of = |query, accepts| Language::of_reader(query, accepts, &all);
        assert_eq!(of("lang=fa", "ar"), Language::Persian);
        assert_eq!(of("x=1&lang=ar", ""), Language::Arabic);
        assert_eq!(of("lang=xx", "de, fa-IR;q=0.8, ar;q=0.9"), Language::Arabic);
        assert_eq!(of("", "AR-EG, en;q=0.9"), Language::Arabic);
        assert_eq!(of("", "fa;q=0, en;q=0.1"), Language::English);
        assert_eq!(of("", "fa;q=nonsense, *"), Language::English);
        assert_eq!(of("", "fa, ar"), Language::Persian, "the first of equals");
        let offered = [Language::Persian, Language::Arabic];
        assert_eq!(Language::of_reader("lang=en", "en", &offered), Language::Persian);
    }

    #[test]
    fn each_language_writes_its_own_numerals() {
        let percents = |share| Language::ALL.map(|language| language.percent(share));
        assert_eq!(percents(99_980), ["99.98%", "٩٩٫٩٨٪", "۹۹٫۹۸٪"]);
        assert_eq!(percents(100_000), ["100%", "١٠٠٪", "۱۰۰٪"]);
        assert_eq!(percents(7), ["0.007%", "٠٫٠٠٧٪", "۰٫۰۰۷٪"]);
        assert_eq!(Language::Persian.number(90), "۹۰");
    }

    #[test]
    fn each_language_has_its_own_calendar() {
        let moments = Language::ALL.map(|language| language.moment(THEN_MS));
        assert_eq!(
            moments,
            ["30 November 2026, 14:05 UTC", "٣٠ نوفمبر ٢٠٢٦، ١٤:٠٥ UTC", "۹ آذر ۱۴۰۵، ۱۴:۰۵ UTC"]
        );
        let persian = |ms| Language::Persian.date(day_of(ms));
        assert_eq!(persian(1_774_051_200_000), "۱ فروردین ۱۴۰۵", "21 March 2026: Nowruz");
        assert_eq!(persian(1_742_428_800_000), "۳۰ اسفند ۱۴۰۳", "20 March 2025: the end of a leap year");
    }

    #[test]
    fn machines_get_the_moments_that_their_formats_want() {
        assert_eq!(rfc3339(THEN_MS), "2026-11-30T14:05:00Z");
        assert_eq!(rfc822(THEN_MS), "Mon, 30 Nov 2026 14:05:00 +0000");
    }

    #[test]
    fn nothing_is_left_out_of_a_sentence_with_gaps() {
        for words in Language::ALL.map(Language::words) {
            for gap in ["{share}", "{goal}", "{left}"] {
                assert!(words.goal.contains(gap), "{}", words.goal);
            }
        }
    }
}
